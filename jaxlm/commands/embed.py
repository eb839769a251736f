"""Print vectors of texts, or write them to a file.

jaxlm embed RUN_OR_HF_DIR [TEXT …] [--data.source FILE] [--out FILE.npy]

Each line is a JSON object with `text` and `vector`. --out writes a float32 array [texts, width] instead.
"""

from __future__ import annotations

import json
from pathlib import Path

from jaxlm.commands.common import Parser, mesh_of, mesh_options, output_option, remark_length, start_jax, vector_options
from jaxlm.errors import UserError
from jaxlm.paths import new_file


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = Parser("jaxlm embed", __doc__)
    parser.add_argument("model", help="a run folder, a Transformers folder or hf:ORG/NAME[@REVISION]")
    parser.add_argument("texts", nargs="*", metavar="TEXT")
    parser.add_argument("--data.source", dest="source", default=None, help=(
        "file with a text a line; or .jsonl, .csv, .tsv or .parquet with texts in a column"))
    parser.add_argument("--data.text-field", dest="field", default="text", help="that column (default: text)")
    vector_options(parser)
    mesh_options(parser)
    parser.add_argument("--normalize", action="store_true", help="scale vectors to unit length")
    output_option(parser, "--out", "file for the vectors, in numpy's format")
    options = parser.parse_intermixed_args(arguments or ["--help"])
    out = options.out and options.out.removesuffix(".npy") + ".npy"
    start_jax()
    import jax
    import numpy as np

    from jaxlm.parallel.hosts import check_main_output, main_first, together
    from jaxlm.runs.model import load_trained

    check_main_output(out, "--out", options.overwrite, (options.source or "",))
    source, field = options.source, options.field
    texts = [*options.texts, *together(lambda: _read_texts(source, field) if source else [], "all to read the texts")]
    if not texts:
        raise UserError("there is no text; give one, or --data.source FILE.")
    model = load_trained(options.model, mesh_of(options))
    if out and model.vectors.similarity == "maxsim":
        raise UserError(f"{options.model} has a vector per token, of which no array can be written; leave out --out.")
    remark_length(options.length, model)
    vectors = model.encode(
        texts, options.pooling, options.length, options.normalize or None, options.prompt, progress=True
    )
    if out is None:
        for text, vector in zip(texts, vectors, strict=True) if jax.process_index() == 0 else ():
            print(json.dumps({"text": text, "vector": vector.tolist()}, ensure_ascii=False))
        return

    def write() -> None:
        try:
            with new_file(Path(out)) as file:
                np.save(file, vectors)
        except OSError as error:
            raise UserError(f"{out} cannot be written ({error.strerror}); choose another --out.") from error
        print(f"Wrote {vectors.shape[0]:,} vectors of width {vectors.shape[1]:,} to {out}.")

    main_first(write, "write the vectors", everywhere=False)


def _read_texts(source: str, field: str) -> list[str]:
    """Return the lines of a file that are not empty, or one column of its rows."""
    from jaxlm.data.readers import Columns, read_lines
    from jaxlm.data.rows import kind_of
    from jaxlm.tasks.tables import whole_table

    if kind_of(source) in (None, "text"):
        return [line.strip() for _, line in read_lines(source) if line.strip()]
    rows = whole_table(source, Columns((field,), "Choose the column with --data.text-field"))
    if empty := next((row for row in rows if not row.text(field).strip()), None):
        raise UserError(f"{empty.place} has no {field}; fill it in, or remove the row.")
    return [row.text(field).strip() for row in rows]
