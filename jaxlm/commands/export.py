"""Write a run's newest or best checkpoint as a Transformers folder.

jaxlm export RUN OUT
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxlm.commands.common import Parser, start_jax
from jaxlm.errors import UserError

if TYPE_CHECKING:
    from jaxlm.objectives.pretrained import PretrainedModel
    from jaxlm.types import Vectors


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = Parser("jaxlm export", __doc__)
    parser.add_argument("run", help="a run folder")
    parser.add_argument("out", help="folder to write; must not exist or be empty")
    parser.add_argument("--sentence-transformers", choices=("cls", "mean", "last", "none"), default=None, help=(
        "pooling of the vectors that sentence-transformers computes from the folder, those of `jaxlm embed`; by "
        "default those that the run has trained, mean for another pretrained encoder, else none"))
    parser.add_argument("--normalize", action="store_true", help="scale these vectors to unit length")
    options = parser.parse_args(arguments or ["--help"])
    start_jax()
    from jaxlm.huggingface import ModelCard, export_folder
    from jaxlm.parallel.hosts import main_first
    from jaxlm.parallel.inference import to_host
    from jaxlm.runs.folder import RunFolder
    from jaxlm.runs.load import load_run
    from jaxlm.training.metrics import last_evaluation

    model, run = load_run(options.run), RunFolder.read(options.run)
    step, vocabulary, experiment, metadata = model.step, model.tokenizer.vocabulary, run.experiment, run.metadata
    begun = metadata.get("imported_from", "")
    is_mean = len(run.named_steps) > 1  # no evaluation is of these parameters
    evaluated, evaluation = (0, {}) if is_mean else last_evaluation(run.path, up_to=step)
    steps = f"mean of steps {', '.join(f'{each:,}' for each in run.named_steps)}" if is_mean else ""
    earlier = bool(evaluation) and evaluated != step
    card = ModelCard(
        rows={
            "Training steps": f"{step:,}",
            "Parameters": steps,
            "Sequence length": experiment.longest_rows(step),
            "Batch size": experiment.train.batch_size,
            "Phases": experiment.describe_phases(step) if experiment.train.phases and step else "",
            "Optimizer": f"{experiment.optimizer.name}, peak learning rate {experiment.optimizer.learning_rate:g}",
            "Held-out evaluation": f"of step {evaluated:,}" if earlier else "",
            "Started from": begun if begun.startswith("hf:") else begun.rpartition("/")[2],
            "Data": metadata.get("source", ""),
            "Data fingerprint": f"`{metadata['data']}`" if "data" in metadata else "",
            "Tokenizer": f"{vocabulary.size:,} ids, fingerprint {model.tokenizer.fingerprint[:16]}",
        },
        metrics={f"eval_{name}": value for name, value in evaluation.items()},
    )
    vectors = _vectors(model, options.sentence_transformers, options.normalize)
    fields = experiment.data.format_fields() if model.objective.scores_rows else ()
    rows = {f.name: value for f in fields if (value := getattr(experiment.data, f.name)) != f.default}
    params = to_host(model.params)  # a collective: every process has shards
    out = main_first(lambda: export_folder(
        options.out, model.objective, params, model.tokenizer, card, max_length=_longest(model, bool(begun)),
        vectors=vectors, stop_ids=model.settings.stop_ids,
        sampling=model.settings.sampling, settings={"fresh": model.fresh, "rows": rows}, step=step,
    ), "write the folder", everywhere=False)
    name = model.objective.primary_metric
    loss = f", held-out {name} {evaluation[name]:.4f}" if name in evaluation else ""
    if loss and earlier:
        loss += f" at step {evaluated:,}"
    what = f"the {steps}" if is_mean else f"step {step:,}"
    if out:
        print(f"Wrote {what}{loss} to {out}; its README.md says how it is loaded.")


def _longest(model: PretrainedModel, is_imported: bool) -> int | None:
    """Return the number of tokens at which Transformers is to cut texts.

    Shorter rows do not unlearn the longer ones of a folder, also of one that names no limit.
    """
    objective, most = model.objective, model.objective.model.max_length
    is_own = objective.scores_rows or objective.vector_settings(None) or model.settings.length
    return most if is_imported and most and not is_own else model.length


def _vectors(model: PretrainedModel, pooling: str | None, normalize: bool) -> Vectors | None:
    """Return the settings of the folder's vectors, None for none; raise UserError for flags that change nothing."""
    from jaxlm.huggingface.families import writer_of
    from jaxlm.types import Vectors

    objective = model.objective
    trained = None if objective.scores_rows else model.settings.vectors  # a task has unlearnt them
    is_own_kind = writer_of(objective) or (trained and trained.similarity == "maxsim")
    if is_own_kind and (pooling not in (None, "none") or normalize):
        raise UserError(f"{model.path} has vectors of its own kind; leave out --sentence-transformers and --normalize.")
    is_encoder = not objective.scores_rows and objective.answer_kind != "text"
    pooling = pooling or (trained.pooling if trained else "mean" if is_encoder else "none")
    if pooling == "none" and normalize:
        raise UserError("--normalize is for vectors, which this folder does not get; choose their pooling with "
                        "--sentence-transformers.")
    found = trained or Vectors("mean", model.vector_length, False)
    return None if pooling == "none" else found._replace(pooling=pooling, normalize=normalize or found.normalize)
