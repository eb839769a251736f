"""Write a Transformers folder as a run, which can be trained further or looked at.

jaxlm import HF_DIR OUT
"""

from __future__ import annotations

from jaxlm.commands.common import Parser, start_jax
from jaxlm.errors import UserError
from jaxlm.paths import run_path


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = Parser("jaxlm import", __doc__)
    parser.add_argument("hf_dir", help=(
        "a folder that Transformers saved (config.json, safetensors, tokenizer files), or hf:ORG/NAME[@REVISION]"))
    parser.add_argument("out", help="run folder to write; must not exist or be empty")
    parser.add_argument("--seed", type=int, default=0, help="random seed of heads that the folder lacks (0)")
    options = parser.parse_args(arguments or ["--help"])
    out = run_path(options.out)
    # A run that was killed before it wrote its configuration leaves its lock behind.
    if out.exists() and (not out.is_dir() or any(path.name != ".lock" for path in out.iterdir())):
        raise UserError(f"{out} is there already and is not empty; nothing was written, choose another folder.")
    start_jax(alone="jaxlm import")
    from jaxlm import hub
    from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
    from jaxlm.data.text import TextData
    from jaxlm.huggingface import import_folder
    from jaxlm.runs.folder import write_imported_run

    name = hub.pin(options.hf_dir)
    imported = import_folder(hub.local(name), seed=options.seed)
    if imported.objective.command != "pretrain":
        raise UserError(
            f"{options.hf_dir} holds a fine-tuned {type(imported.objective).__name__}, which needs no import: give it "
            "to `jaxlm evaluate`, or to `jaxlm finetune` as --init-from."
        )
    # At most the number of the model's positions.
    length = min(TextData.length, imported.objective.model.max_length or TextData.length)
    # Defaults of continued pretraining; only the user knows the text.
    experiment = Experiment(
        objective=imported.objective, data=TextData(source="", length=length),
        optimizer=OptimizerConfig(learning_rate=5e-5, warmup_steps=500), train=TrainConfig(steps=10_000, batch_size=32),
    )
    write_imported_run(
        out, experiment, imported.params, imported.tokenizer,
        {"imported_from": name, "fresh": list(imported.fresh),
         "settings": imported.settings._replace(length=imported.length).to_json()},
    )
    print(f"Imported a {type(imported.objective.model).__name__} from {options.hf_dir} into {out}.")
    if imported.fresh:
        print(f"It had no {', '.join(imported.fresh)}: initialized afresh.")
    rows, known = imported.objective.model.vocab_size, imported.tokenizer.vocabulary.size
    if known < 0.9 * rows:
        print(f"Its tokenizer has {known:,} tokens for the model's {rows:,} rows; is it the model's own?")
    t, o = experiment.train, experiment.optimizer
    print(
        f"Continue pretraining with `jaxlm pretrain {out} --data.source TEXT`: {t.steps:,} steps of {t.batch_size} "
        f"rows, learning rate {o.learning_rate:g} after {o.warmup_steps:,} warm-up steps, unless flags say otherwise."
    )
