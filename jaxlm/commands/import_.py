"""jaxlm import HF_DIR OUT: a Transformers folder as a run, to go on training or to look at"""

from __future__ import annotations

from jaxlm.commands.common import Parser, start_jax
from jaxlm.errors import UserError
from jaxlm.paths import local_folder


def main(arguments: list[str]) -> int:
    parser = Parser("jaxlm import", description=__doc__, allow_abbrev=False)
    parser.add_argument("hf_dir", help="a folder that Transformers saved (config.json, safetensors, tokenizer files)")
    parser.add_argument("out", help="run folder to write; must not exist or be empty")
    parser.add_argument("--seed", type=int, default=0, help="seed of heads that the folder lacks (0)")
    options = parser.parse_args(arguments or ["--help"])
    out = local_folder(options.out, "runs")
    # A run that did not get as far as its configuration leaves its lock behind.
    if out.exists() and (not out.is_dir() or any(path.name != ".lock" for path in out.iterdir())):
        raise UserError(f"{out} is there already and is not empty; nothing was written, choose another folder.")
    start_jax()
    from jaxlm.config.experiment import Experiment
    from jaxlm.data.text import TextData
    from jaxlm.huggingface import import_folder
    from jaxlm.huggingface.families import family_of
    from jaxlm.runs.run import write_imported_run

    imported = import_folder(options.hf_dir, seed=options.seed)
    # A length that the model has positions for, so that the run can be used and trained as it is.
    length = min(TextData.length, family_of(imported.objective).max_length(imported.objective))
    # Which text it goes on with, nobody but the user knows.
    experiment = Experiment(objective=imported.objective, data=TextData(source="", length=length))
    write_imported_run(
        out, experiment, imported.params, imported.tokenizer,
        {"imported_from": str(options.hf_dir), "fresh": imported.fresh_heads},
    )
    print(f"Imported {imported.architecture or imported.model_type} from {options.hf_dir} into {out}.")
    if imported.fresh:
        print(f"It had no {', '.join(imported.fresh_heads)}: initialised afresh.")
    rows, known = imported.objective.model.vocab_size, imported.tokenizer.vocabulary.size
    if known < 0.9 * rows:
        print(f"Its tokenizer has {known:,} tokens for the model's {rows:,} rows; is it the model's own?")
    print(
        f"Go on training with `jaxlm pretrain {out} --data.source TEXT --train.steps N --train.batch-size B "
        "--optimizer.warmup-steps W`."
    )
    return 0
