"""Fine-tuned models in Transformers: …ForSequenceClassification, …ForMultipleChoice and so on.

The names of a model are those of its pretraining family; only the head is new.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jaxlm import systems
from jaxlm.errors import UserError
from jaxlm.fields import marks_of
from jaxlm.huggingface.family import Family, Source, TransformersModel
from jaxlm.huggingface.table import Table, dense
from jaxlm.models.albert import Albert
from jaxlm.models.bert import Bert
from jaxlm.models.distilbert import Distilbert
from jaxlm.models.electra import Electra, ElectraEncoder
from jaxlm.models.gpt1 import Gpt1
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.roberta import Roberta
from jaxlm.models.xlm_roberta import XlmRoberta
from jaxlm.models.xlnet import Xlnet
from jaxlm.tasks.answers import Answers
from jaxlm.tasks.base import Task
from jaxlm.tasks.classification import Classification
from jaxlm.tasks.multiple_choice import MultipleChoice
from jaxlm.tasks.tagging import Tagging
from jaxlm.tasks.text_to_text import TextToText
from jaxlm.tokenizers.template import symbol_id


class Head(NamedTuple):
    """Transformers class of a task and its head.

    Attributes:
        architecture: class name.
        classifier: name of the classifier layer.
        dense: name of the layer before it; "" if there is none.
        config: fields of config.json that determine the head.
    """

    architecture: str
    classifier: str = "classifier"
    dense: str = ""
    config: Mapping[str, Any] = {}


_ELECTRA = {"summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu"}
_XLNET = {"summary_type": "last", "summary_use_proj": True, "summary_activation": "tanh"}
HEADS: dict[tuple[type[Task], type], Head] = {
    (Classification, Bert): Head("BertForSequenceClassification", dense="bert.pooler.dense"),
    (MultipleChoice, Bert): Head("BertForMultipleChoice", dense="bert.pooler.dense"),
    (Tagging, Bert): Head("BertForTokenClassification"),
    (Answers, Bert): Head("BertForQuestionAnswering", "qa_outputs"),
    (Classification, Roberta): Head("RobertaForSequenceClassification", "classifier.out_proj", "classifier.dense"),
    (MultipleChoice, Roberta): Head("RobertaForMultipleChoice", dense="roberta.pooler.dense"),
    (Tagging, Roberta): Head("RobertaForTokenClassification"),
    (Answers, Roberta): Head("RobertaForQuestionAnswering", "qa_outputs"),
    (Classification, XlmRoberta): Head(
        "XLMRobertaForSequenceClassification", "classifier.out_proj", "classifier.dense"),
    (MultipleChoice, XlmRoberta): Head("XLMRobertaForMultipleChoice", dense="roberta.pooler.dense"),
    (Tagging, XlmRoberta): Head("XLMRobertaForTokenClassification"),
    (Answers, XlmRoberta): Head("XLMRobertaForQuestionAnswering", "qa_outputs"),
    (Classification, Albert): Head("AlbertForSequenceClassification", dense="albert.pooler"),
    (MultipleChoice, Albert): Head("AlbertForMultipleChoice", dense="albert.pooler"),
    (Tagging, Albert): Head("AlbertForTokenClassification"),
    (Answers, Albert): Head("AlbertForQuestionAnswering", "qa_outputs"),
    (Classification, Distilbert): Head("DistilBertForSequenceClassification", dense="pre_classifier"),
    (MultipleChoice, Distilbert): Head("DistilBertForMultipleChoice", dense="pre_classifier"),
    (Tagging, Distilbert): Head("DistilBertForTokenClassification"),
    (Answers, Distilbert): Head("DistilBertForQuestionAnswering", "qa_outputs"),
    (Classification, ElectraEncoder): Head(
        "ElectraForSequenceClassification", "classifier.out_proj", "classifier.dense"),
    (MultipleChoice, ElectraEncoder): Head(
        "ElectraForMultipleChoice", dense="sequence_summary.summary", config=_ELECTRA),
    (Tagging, ElectraEncoder): Head("ElectraForTokenClassification"),
    (Answers, ElectraEncoder): Head("ElectraForQuestionAnswering", "qa_outputs"),
    (Classification, Xlnet): Head(
        "XLNetForSequenceClassification", "logits_proj", "sequence_summary.summary", _XLNET),
    (MultipleChoice, Xlnet): Head("XLNetForMultipleChoice", "logits_proj", "sequence_summary.summary", _XLNET),
    (Tagging, Xlnet): Head("XLNetForTokenClassification"),
    (Answers, Xlnet): Head("XLNetForQuestionAnsweringSimple", "qa_outputs"),
    (Classification, Gpt2): Head("GPT2ForSequenceClassification", "score"),
    (Tagging, Gpt2): Head("GPT2ForTokenClassification"),
    (Answers, Gpt2): Head("GPT2ForQuestionAnswering", "qa_outputs"),
    (Classification, Gpt1): Head("OpenAIGPTForSequenceClassification", "score"),
}
USES: dict[type[Task], tuple[str, str]] = {
    Classification: ("AutoModelForSequenceClassification", "text-classification"),
    MultipleChoice: ("AutoModelForMultipleChoice", "multiple-choice"),
    Tagging: ("AutoModelForTokenClassification", "token-classification"),
    Answers: ("AutoModelForQuestionAnswering", "question-answering"),
}
"""Auto class and hub task of each task."""
TASK_PARAMS = ("pooler", "classifier", "kind_classifier")
"""Parameters that a task adds to a model."""
SETTINGS_KEY = "jaxlm"
"""Key of config.json for settings of a task without a counterpart in its Transformers class."""


def pretraining_objective(task: Task) -> Any:
    """Return an objective that pretrains the task's model, whose family has its names.

    Raises:
        UserError: the model has no Transformers class.
    """
    model = task.model
    if isinstance(model, ElectraEncoder):  # the discriminator of an ELECTRA; the size of the generator has no effect
        both = {f.name for f in dataclasses.fields(Electra)} & {f.name for f in dataclasses.fields(model)}
        model = Electra(**{name: getattr(model, name) for name in both})
    system = next((system for system in systems.importable() if system.model is type(model)), None)
    if system is None:
        raise UserError(f"the model {type(model).__name__} has no class in Transformers, so it cannot be exported.")
    return system.objective(model=model, vocabulary=task.vocabulary)


def export_family(base: Family, task: Task) -> Family:
    """Return the family that exports a task, given that of its pretraining objective.

    Text-to-text tasks are exported like their pretraining objective.
    """
    if isinstance(task, TextToText):
        return dataclasses.replace(base, models=lambda task: base.models(pretraining_objective(task)))
    return dataclasses.replace(base, template=task.template, models=lambda task: (_transformers_model(base, task),))


def import_family(base: Family, architecture: str) -> Family:
    """Return the family of a folder of this class: the task's, or `base` for pretraining classes."""
    found = next(((kind, head) for (kind, _), head in HEADS.items() if head.architecture == architecture), None)
    return base if found is None else dataclasses.replace(
        base, models=lambda task: (_transformers_model(base, task),), stored_models=None,
        read_objective=lambda source: _read_task(base, *found, source),
    )


def _transformers_model(base: Family, task: Task) -> TransformersModel:
    """Return the Transformers model of a task."""
    kind = next((cls for cls in type(task).__mro__ if cls in USES), None)  # a distilled model counts as its plain task
    model_class = next((cls for cls in type(task.model).__mro__ if cls in {model for _, model in HEADS}), None)
    head = HEADS.get((kind, model_class))
    if head is None or getattr(task, "both_orders", False):
        what = " that reads a pair in both orders" if head else ""
        raise UserError(
            f"{type(task).__name__} with a {type(task.model).__name__}{what} has no class in Transformers, so it "
            "cannot be exported."
        )
    main = base.models(pretraining_objective(task))[0]
    auto_class, use = USES[kind]
    return TransformersModel(
        head.architecture, auto_class, main.config | _config(kind, task, head), _table(main.table, task, head),
        pipeline_tag=use,
    )


def _table(main: Table, task: Task, head: Head) -> Table:
    """Return the table of the pretraining class with its heads replaced by the task's."""
    model_params = jax.eval_shape(task.init, jax.random.key(0)).keys() - set(TASK_PARAMS)
    entries = [
        dataclasses.replace(entry, ours=tuple(path.removeprefix("discriminator/") for path in entry.ours))
        for entry in main.entries
    ]
    kept = [entry for entry in entries if entry.ours[0].partition("/")[0] in model_params]
    # Older files have a pooler that the task does not use.
    ignored = (*main.ignored, *(entry.theirs for entry in entries if entry not in kept))
    if head.dense:
        kept += dense("pooler", head.dense)
    kept += dense("classifier", head.classifier, bias=task.reading.use_bias or not task.pools)
    names = {entry.theirs for entry in kept}
    return Table(
        entries=tuple(kept), prefix=main.prefix, old_endings=main.old_endings,
        ignored=tuple(name for name in ignored if name not in names),
        private=("kind_classifier", "projection_to_teacher"),
    )


def _config(kind: type[Task], task: Task, head: Head) -> dict[str, Any]:
    """Return the fields of config.json that belong to the task."""
    template, v = task.template, task.vocabulary
    config: dict[str, Any] = {"classifier_dropout": task.classifier_dropout, **head.config}
    if isinstance(task.model, Xlnet):
        config["mem_len"] = None
    if v is not None and v.pad < 0 and template.symbols:  # GPT-1: its class reads the last token before padding
        config["pad_token_id"] = symbol_id(v, template.symbols[0])
    if isinstance(task, (Classification, Tagging)):
        names = task.labels or ("LABEL_0",)
        config["id2label"] = {str(number): name for number, name in enumerate(names)}
        config["label2id"] = {name: number for number, name in enumerate(names)}
    if isinstance(task, Classification):
        is_number = task.target == "number"
        config["problem_type"] = "regression" if is_number else "single_label_classification"
    settings = {f.name: getattr(task, f.name) for f in _settings(kind)
                if getattr(task, f.name) != f.default}
    return config | ({SETTINGS_KEY: settings} if settings else {})


def _settings(kind: type[Task]) -> list[dataclasses.Field[Any]]:
    """Return the fields of a task's format and scoring, without those of its parameters."""
    return [f for f in dataclasses.fields(kind) if not marks_of(f) & {"bound", "weights"}
            and f.name not in ("both_orders", "lm_coefficient", "classifier_dropout")]


def _read_task(base: Family, kind: type[Task], head: Head, source: Source) -> Task:
    """Read a task from a folder of its Transformers class."""
    for key, value in head.config.items():
        source.require(key, value)
    fields: dict[str, Any] = {"classifier_dropout": source.number("classifier_dropout", kind.classifier_dropout)}
    names = source.config.get("id2label")
    names = names or {number: f"LABEL_{number}" for number in range(source.number("num_labels", 2))}
    if kind is Classification:
        source.require("problem_type", "regression", "single_label_classification")
        if source.config.get("problem_type") == "regression" or len(names) == 1:
            fields["target"] = "number"
    if kind in (Classification, Tagging) and "target" not in fields:
        fields["labels"] = tuple(str(names[number]) for number in sorted(names, key=int))
    stored = source.config.get(SETTINGS_KEY) or {}
    for f in _settings(kind):
        if isinstance(value := stored.get(f.name), type(f.default)):
            fields[f.name] = value
    return kind(model=base.read_objective(source).model.text_model, **fields)
