"""Print vectors of texts, or write them to a file.

jaxlm embed RUN_OR_HF_DIR [TEXT …] [--data.source FILE] [--out FILE.npy]

Each line is a JSON object with `text` and `vector`. --out writes a float32 array [texts, width] instead.
"""

from __future__ import annotations

import json
from pathlib import Path

from jaxlm.commands.common import Parser, output_option, start_jax
from jaxlm.errors import UserError
from jaxlm.paths import check_output


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = Parser("jaxlm embed", __doc__)
    parser.add_argument("model", help="a run folder, a Transformers folder or hf:ORG/NAME[@REVISION]")
    parser.add_argument("texts", nargs="*", metavar="TEXT")
    parser.add_argument("--data.source", dest="source", default=None, help="file with a text a line")
    parser.add_argument("--pooling", choices=("cls", "mean", "last"), default=None, help=(
        "cls: vector of the summary token; mean: mean over all tokens; last: vector of the last token; by default as a "
        "folder of sentence-transformers says, else mean"))
    parser.add_argument("--normalize", action="store_true", help="scale vectors to unit length")
    parser.add_argument("--length", type=int, default=None, help="longest text in tokens; the rest is cut")
    parser.add_argument("--prompt", default=None, help=(
        "text before each text, such as 'query: '; by default that of a folder of sentence-transformers"))
    output_option(parser, "--out", "file for the vectors, in numpy's format")
    options = parser.parse_args(arguments or ["--help"])
    if options.length is not None and options.length < 3:
        raise UserError(f"--length must be 3 or more, not {options.length}.")
    out = options.out and options.out.removesuffix(".npy") + ".npy"
    check_output(out, "--out", options.overwrite, (options.source or "",))
    start_jax()
    import numpy as np

    from jaxlm import hub
    from jaxlm.data.readers import read_lines
    from jaxlm.huggingface.sentence_transformers import read
    from jaxlm.inference.embed import embed
    from jaxlm.runs.load import load_model
    from jaxlm.types import Vectors

    texts = list(options.texts)
    if options.source:
        texts += [line.strip() for _, line in read_lines(options.source) if line.strip()]
    if not texts:
        raise UserError("there is no text; give one, or --data.source FILE.")
    name = hub.pin(options.model)
    model = load_model(name)
    folder = read(Path(hub.local(name)), options.prompt)
    settings = folder or model.objective.vectors(None) or Vectors("mean", None, False)
    if settings.prompts and options.prompt is None:
        prompts = dict(settings.prompts)
        raise UserError(f"{name} has the prompts {prompts}; give the text of one, or '' for none, with --prompt.")
    prompt = settings.prompt if options.prompt is None else options.prompt
    vectors = embed(
        model, [prompt + text for text in texts], options.pooling or settings.pooling,
        options.length or settings.length, options.normalize or settings.normalize,
    )
    if out is None:
        for text, vector in zip(texts, vectors, strict=True):
            print(json.dumps({"text": text, "vector": vector.tolist()}, ensure_ascii=False))
        return
    try:
        np.save(out, vectors)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}); choose another --out.") from error
    print(f"Wrote {vectors.shape[0]:,} vectors of width {vectors.shape[1]:,} to {out}.")
