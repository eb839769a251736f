"""Fine-tuned models in Transformers: …ForSequenceClassification, …ForMultipleChoice and so on.

The names of a model are those of its pretraining family; only the head is new.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from typing import Any

import jax

from jaxlm import systems
from jaxlm.errors import UserError
from jaxlm.fields import marks_of
from jaxlm.huggingface.family import Family, Head, Source, TransformersModel
from jaxlm.huggingface.sentence_transformers import CONFIG, reranker_prompt
from jaxlm.huggingface.table import Table, dense
from jaxlm.objectives.base import Bound, Objective
from jaxlm.tasks.base import Task
from jaxlm.tasks.classification import Classification
from jaxlm.tasks.rerank import Rerank
from jaxlm.tasks.tagging import Tagging
from jaxlm.tasks.text_to_text import TextToText
from jaxlm.tokenizers.template import symbol_id

TASK_PARAMS = ("pooler", "classifier", "kind_classifier")
"""Parameters that a task adds to a model."""
PROBLEM_TYPES = {
    "class": "single_label_classification", "number": "regression", "labels": "multi_label_classification",
}
"""`problem_type` in config.json of each `Classification.target`."""
CROSS_ENCODER = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
"""Entry of config.json by which `CrossEncoder` of sentence-transformers returns logits."""
CROSS_ENCODER_KEYS = {*CROSS_ENCODER, "sbert_ce_default_activation_function"}
"""Keys of config.json in folders of `CrossEncoder`, the second until version 4."""
SETTINGS_KEY = "jaxlm"
"""Key of config.json for settings of a task without a counterpart in its Transformers class."""


def pretraining_objective(task: Objective) -> Any:
    """Return an objective that pretrains the task's model, whose family has its names."""
    model = task.model
    system = next((s for s in systems.importable() if type(s.model().text_model) is type(model)), None)
    if system is None:
        raise UserError(f"the model {type(model).__name__} has no class in Transformers, so it cannot be exported.")
    # The text model of ELECTRA is its discriminator; the size of the generator has no effect.
    names = {f.name for f in dataclasses.fields(model)} & {f.name for f in dataclasses.fields(system.model)}
    whole = system.model(**{name: getattr(model, name) for name in names})
    objective = system.objective(model=whole)
    return objective.bind_unchecked(task.vocabulary) if isinstance(task, Bound) else objective


def export_family(base: Family, task: Objective) -> Family:
    """Return the family that exports a task, given that of its pretraining objective.

    Text-to-text tasks are exported like their pretraining objective, text vectors as the model without heads.
    """
    if task.vector_settings(None):
        return dataclasses.replace(base, models=lambda bound: (_bare_model(base, bound),))
    if isinstance(task, TextToText):
        return dataclasses.replace(base, models=functools.partial(_writer, base))
    return dataclasses.replace(base, models=lambda task: (_transformers_model(base, task),))


def _writer(base: Family, task: TextToText) -> tuple[TransformersModel]:
    """Return the Transformers model of the pretraining objective, which writes answers as the task does."""
    (model,) = base.models(pretraining_objective(task))
    generation = {"max_new_tokens": task.max_target, **(model.generation_config or {})}
    if task.beams > 1:
        generation |= {"num_beams": task.beams, "length_penalty": task.length_penalty}
    return (dataclasses.replace(model, generation_config=generation),)


def import_family(base: Family, architecture: str) -> Family:
    """Return the family of a folder of this class: the task's, or `base` for pretraining classes."""
    for entry in systems.all_tasks():
        head = base.heads.get(entry.head)
        if head is not None and head.architecture == architecture:
            return dataclasses.replace(
                base, models=lambda task: (_transformers_model(base, task),),
                stored_models=base.stored_models and functools.partial(_stored_models, base),
                read_objective=functools.partial(_read_task, base, entry.task, head),
            )
    return base


def _transformers_model(base: Family, task: Task) -> TransformersModel:
    """Return the Transformers model of a task."""
    entry = systems.task_of(task)
    head = base.heads.get(entry.head) if entry else None
    if head is None or getattr(task, "both_orders", False):
        what = " that reads a pair in both orders" if head else ""
        raise UserError(
            f"{type(task).__name__} with a {type(task.model).__name__}{what} has no class in Transformers, so it "
            "cannot be exported."
        )
    main = base.models(pretraining_objective(task))[0]
    return TransformersModel(
        head.architecture, f"AutoModelFor{entry.head}", main.config | _config(entry, task, head),
        _table(main.table, base.text_params, task, head), pipeline_tag=entry.pipeline_tag,
        module=main.module,
    )


def _stored_models(base: Family, task: Task, source: Source) -> tuple[TransformersModel]:
    """Return the Transformers model of a task with the names in its folder."""
    models = functools.partial(base.stored_models, source=source)
    return (_transformers_model(dataclasses.replace(base, models=models), task),)


def _bare_model(base: Family, objective: Objective) -> TransformersModel:
    """Return the Transformers model without heads, such as BertModel, of an objective that trains text vectors."""
    main = base.models(pretraining_objective(objective))[0]
    table = _table(main.table, base.text_params, objective)
    prefix = main.table.prefix
    entries = [dataclasses.replace(entry, theirs=entry.theirs.removeprefix(prefix)) for entry in table.entries]
    kind = "TextModel" if main.config["model_type"].endswith("_text") else "Model"  # Gemma3Model reads images, too
    architecture = re.split("For|LMHead|ModelWith", main.architecture)[0] + kind
    return TransformersModel(
        architecture, "AutoModel", main.config, dataclasses.replace(table, entries=tuple(entries), prefix=""),
        pipeline_tag="sentence-similarity", module=main.module,
    )


def _table(main: Table, root: str, task: Objective, head: Head | None = None) -> Table:
    """Return the table of the pretraining class with its heads replaced by the task's, if there is one."""
    model_params = jax.eval_shape(task.init, jax.random.key(0)).keys() - set(TASK_PARAMS)
    entries = [
        dataclasses.replace(entry, ours=tuple(path.removeprefix(f"{root}/") for path in entry.ours))
        for entry in main.entries
    ]
    kept = [entry for entry in entries if entry.ours[0].partition("/")[0] in model_params]
    # Older files have a pooler that the task does not use.
    ignored = (*main.ignored, *(entry.theirs for entry in entries if entry not in kept))
    if head and head.dense:
        kept += dense("pooler", head.dense)
    if head:
        kept += dense("classifier", head.classifier, bias=task.has_classifier_bias)
    # The Ettin decoder's class with a classifier names the head of its language model differently.
    kept = [dataclasses.replace(entry, theirs=entry.theirs.removeprefix("lm_")) for entry in kept]
    names = {entry.theirs for entry in kept}
    return Table(
        entries=tuple(kept), prefix=main.prefix, old_names=main.old_names,
        ignored=tuple(name for name in ignored if name not in names),
    )


def _config(entry: systems.TaskSystem, task: Task, head: Head) -> dict[str, Any]:
    """Return the fields of config.json that belong to the task."""
    kind, template, v = entry.task, task.template, task.vocabulary
    config: dict[str, Any] = {head.dropout: task.classifier_dropout, **head.config}
    if v.pad < 0 and template.symbols:  # GPT-1: its class reads the last token before padding
        config["pad_token_id"] = symbol_id(v, template.symbols[0])
    if entry.head in ("SequenceClassification", "TokenClassification"):  # whose classes have a logit for each name
        names = task.labels or tuple(f"LABEL_{number}" for number in range(task.num_logits))
        if names == tuple(map(str, range(len(names)))):
            names = [f"LABEL_{name}" for name in names]
        config["id2label"] = {str(number): name for number, name in enumerate(names)}
        config["label2id"] = {name: number for number, name in enumerate(names)}
    if issubclass(kind, Classification):
        config["problem_type"] = PROBLEM_TYPES[task.target]
    if kind is Rerank:
        config |= CROSS_ENCODER
    settings = {f.name: getattr(task, f.name) for f in _settings(kind) if getattr(task, f.name) != f.default}
    return config | ({SETTINGS_KEY: settings} if settings else {})


def _settings(kind: type[Task]) -> list[dataclasses.Field[Any]]:
    """Return the fields of a task's format and scoring, without those of its parameters."""
    return [f for f in dataclasses.fields(kind) if not marks_of(f) & {"bound", "weights"}
            and f.name not in ("both_orders", "lm_coefficient", "classifier_dropout", "query_prompt")]


def _read_task(base: Family, kind: type[Task], head: Head, source: Source) -> Task:
    """Read a task from a folder of its Transformers class."""
    source.require(**{key: value for key, value in head.config.items() if value is not None})
    # Classes take the layers' rate for null, or have no field; jaxlm once wrote classifier_dropout for all.
    rate = source.value("hidden_dropout_prob", source.value("dropout", kind.classifier_dropout))
    rate = source.value("classifier_dropout", source.value(head.dropout, rate))
    fields: dict[str, Any] = {"classifier_dropout": rate}
    names = source.config.get("id2label")
    names = names or {number: f"LABEL_{number}" for number in range(source.value("num_labels", 2))}
    if not all(str(number).isdecimal() for number in names):
        raise UserError(f"{source.folder / 'config.json'}: the keys of id2label must be 0, 1, … and not {[*names]}.")
    ((name, count),) = collections.Counter(map(str, names.values())).most_common(1)
    if count > 1:
        raise UserError(f"{source.folder / 'config.json'}: id2label has the name {name!r} {count} times; give each "
                        "class a name of its own.")
    is_cross_encoder = not CROSS_ENCODER_KEYS.isdisjoint(source.config) or (source.folder / CONFIG).is_file()
    prompt = reranker_prompt(source.folder)
    if kind is Classification and len(names) == 1 and is_cross_encoder:
        kind, fields["query_prompt"] = Rerank, prompt
    elif prompt:
        raise UserError(f"{source.folder} puts {prompt!r} before a text, which jaxlm does only for one label; set "
                        f"default_prompt_name in {CONFIG} to null.")
    if kind is Classification:
        source.require(problem_type=tuple(PROBLEM_TYPES.values()))
        # Transformers takes a single logit without a problem type for a number.
        unnamed = "regression" if len(names) == 1 else "single_label_classification"
        targets = {theirs: target for target, theirs in PROBLEM_TYPES.items()}
        fields["target"] = targets[source.config.get("problem_type") or unnamed]
        if fields["target"] == "number" and len(names) > 1:
            raise UserError(f"{source.folder / 'config.json'}: problem_type regression has {len(names)} labels, and "
                            "jaxlm learns one number; choose a model with one label.")
    if kind in (Classification, Tagging) and fields.get("target") != "number":
        labels = [str(names[number]) for number in sorted(names, key=int)]
        # Without names, classes are numbers in their training data.
        is_unnamed = labels == [f"LABEL_{number}" for number in range(len(labels))]
        fields["labels"] = tuple(label.removeprefix("LABEL_") for label in labels) if is_unnamed else tuple(labels)
    stored = source.config.get(SETTINGS_KEY) or {}
    for f in _settings(kind):
        if isinstance(value := stored.get(f.name), type(f.default)):
            fields[f.name] = value
    return kind(model=base.read_objective(source).model.text_model, **fields)
