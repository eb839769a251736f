"""Losses of tasks against PyTorch's functions on the same logits, microbatches, and rows that fill up a batch."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from jaxlm.config.experiment import Experiment
from jaxlm.errors import UserError
from jaxlm.huggingface import gpt2, t5
from jaxlm.models.base import Inputs
from jaxlm.models.bert import Bert
from jaxlm.models.distilbert import Distilbert
from jaxlm.models.electra import Electra
from jaxlm.models.elmo import spell
from jaxlm.models.gpt1 import Gpt1
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.llama import EuroBert, Llama
from jaxlm.models.modernbert import ModernBert
from jaxlm.models.roberta import Roberta
from jaxlm.models.t5 import T5
from jaxlm.objectives.base import total_loss
from jaxlm.objectives.layer_distillation import LayerDistillation
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.runs.session import require_model
from jaxlm.tasks.answers import Answers
from jaxlm.tasks.classification import Classification
from jaxlm.tasks.distillation import DistilledClassification
from jaxlm.tasks.multiple_choice import MultipleChoice
from jaxlm.tasks.tagging import Tagging
from jaxlm.tasks.text_to_text import TextToText
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training.microbatches import gradients
from tests.huggingface.support import load_into
from tests.params import first_fast, random_params

VOCABULARY = Vocabulary.stand_in(160, ["[START]", "[DELIMITER]", "[EXTRACT]"])
NO_DROPOUT = dict(dropout=0.0, attention_dropout=0.0)
SIZES = dict(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32, **NO_DROPOUT)
POSITIONS = dict(max_positions=24, init_std=0.3)
LABELS = dict(labels=("a", "b", "c"), classifier_dropout=0.0)
TASKS = {
    "classes": Classification(model=Bert(**(SIZES | {"num_layers": 2}), **POSITIONS), **LABELS),
    "numbers": Classification(model=Distilbert(**SIZES, **POSITIONS), target="number", classifier_dropout=0.0),
    "gpt-1": Classification(model=Gpt1(**SIZES, **POSITIONS), lm_coefficient=0.5, **LABELS),
    "gpt-1 pairs": Classification(
        model=Gpt1(**SIZES, **POSITIONS), lm_coefficient=0.5, target="number", both_orders=True, classifier_dropout=0.0
    ),
    "gpt-1 choices": MultipleChoice(model=Gpt1(**SIZES, **POSITIONS), lm_coefficient=0.5, classifier_dropout=0.0),
    "choices": MultipleChoice(model=Bert(**SIZES, **POSITIONS), classifier_dropout=0.0),
    "tags": Tagging(model=Gpt2(**SIZES, **POSITIONS), **LABELS),
    "answers": Answers(model=Bert(**SIZES, **POSITIONS), classifier_dropout=0.0, kinds=True),
    "t5": TextToText(model=T5(**SIZES, head_dim=8, start_id=9), max_target=6),
    "decoder": TextToText(model=Gpt2(**SIZES, **POSITIONS), max_target=6),
}


def made(name, rows=8):
    """Return a task, its parameters, and a batch of rows of several lengths, the last two of which fill it up."""
    task = TASKS[name].bind(VOCABULARY, 24)
    params = jax.tree.map(jnp.asarray, random_params(task, std=0.3))
    batch = task.synthetic(rows, 24)
    draw = np.random.default_rng(3)
    sizes = draw.integers(4, 25, batch["attention_mask"].shape[:-1])
    mask = np.arange(24) < sizes[..., None]
    batch["attention_mask"] = mask.astype(np.int32)
    batch["row"] = np.where(np.arange(rows) < rows - 2, np.arange(rows), -1).astype(np.int32)
    for key, most in (("label", 3), ("labels", 3), ("start", 4), ("end", 4), ("kind", 4)):
        if key in batch:
            most = 2 if "choices" in name else most
            value = draw.integers(-1 if key == "labels" else 0, most, batch[key].shape)
            batch[key] = value.astype(batch[key].dtype)
    if "weights" in batch:
        batch["weights"] = (draw.random(batch["weights"].shape) < 0.5).astype(np.float32)
        if name == "decoder":
            batch["weights"] *= mask
    return task, params, {key: jnp.asarray(value) for key, value in batch.items()}


def evaluated(task, params, batch):
    """Return the loss without dropout."""
    return float(jax.jit(lambda p, b: total_loss(task.loss(p, b, jax.random.key(0), False)))(params, batch))


def predicted(task, params, batch):
    return jax.jit(task.predict)(params, batch)


def tensor(x):
    return torch.tensor(np.asarray(x))


@pytest.mark.slow  # objectives/test_accumulation.py has the loop over microbatches
@pytest.mark.parametrize("name", [  # GPT-1's other tasks are as its choices
    name for name in TASKS if name not in ("gpt-1", "gpt-1 pairs")
])
def test_microbatches_add_up_to_the_batch(name):
    task, params, batch = made(name)

    def run(parts):
        return jax.jit(lambda p, b: gradients(task, p, b, (), jax.random.key(0), parts)[:2])(params, batch)

    grads, terms = run(1)
    for parts in (2, 4) if name == "classes" else (4,):  # how many there are is the length of a loop
        other, found = run(parts)
        for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-6, rtol=1e-5)
        assert float(found["loss"].total) == pytest.approx(float(terms["loss"].total), rel=1e-5)
    # Rows that fill up a batch change nothing.
    fewer = {key: value[:6] for key, value in batch.items()}
    alone = jax.jit(lambda p, b: total_loss(task.loss(p, b, jax.random.key(0), True)))(params, fewer)
    assert float(alone) == pytest.approx(float(terms["loss"].total), rel=1e-5)


def test_classes_and_numbers_as_torch():
    task, params, batch = made("classes")
    logits, label = tensor(predicted(task, params, batch)["logits"])[:6], tensor(batch["label"])[:6].long()
    assert evaluated(task, params, batch) == pytest.approx(float(F.cross_entropy(logits, label)), rel=1e-5)
    task, params, batch = made("numbers")
    logits = tensor(predicted(task, params, batch)["logits"])[:6, 0]
    wanted = F.mse_loss(logits, tensor(batch["label"])[:6])
    assert evaluated(task, params, batch) == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-1 pairs", *(
    pytest.param(name, marks=pytest.mark.slow) for name in ("gpt-1", "gpt-1 choices")
)])
def test_the_language_model_beside_a_task(name):
    """Radford et al. 2018, equation 5: the mean over each text's tokens, then over texts, times λ, only in training.
    Both orders of a pair are texts, and so are all choices."""
    task, params, batch = made(name)
    ids, mask = (batch[name][:6].reshape(-1, 24) for name in ("input_ids", "attention_mask"))
    model = task.model
    logits = tensor(jax.jit(lambda p: model.predict_tokens(p, model.hidden_states(p, Inputs(ids, mask=mask))))(params))
    losses = []
    for row, size in enumerate(map(int, mask.sum(axis=1))):
        losses.append(F.cross_entropy(logits[row, : size - 1], tensor(ids[row]).long()[1:size]))
    assert len(losses) == {"gpt-1": 6, "gpt-1 pairs": 12, "gpt-1 choices": 24}[name]
    own, both = (
        float(jax.jit(lambda p, b, train=train: total_loss(task.loss(p, b, jax.random.key(0), train)))(params, batch))
        for train in (False, True)
    )
    assert both == pytest.approx(own + 0.5 * float(torch.stack(losses).mean()), rel=1e-5)
    more = task.flops(24) - dataclasses.replace(task, lm_coefficient=0.0).flops(24)
    assert more == 2 * 24 * task.model.hidden_size * task.model.vocab_size * len(losses) / 6


def test_tags_and_answers_as_torch():
    task, params, batch = made("tags")
    logits = tensor(jax.jit(lambda p, b: task.token_logits(p, b, None))(params, batch))[:6]
    labels = tensor(batch["labels"])[:6].long()
    wanted = F.cross_entropy(logits.reshape(-1, 3), labels.reshape(-1), ignore_index=-1)
    assert evaluated(task, params, batch) == pytest.approx(float(wanted), rel=1e-5)
    task, params, batch = made("answers")
    found = {side: tensor(values)[:6] for side, values in predicted(task, params, batch).items()}
    parts = {side: F.cross_entropy(found[side], tensor(batch[side])[:6].long()) for side in ("start", "end", "kind")}
    wanted = float((parts["start"] + parts["end"]) / 2 + parts["kind"])
    assert evaluated(task, params, batch) == pytest.approx(wanted, rel=1e-5)


def test_answers_that_are_written_as_transformers():
    """The models of Transformers shift the labels: T5's are read from `decoder_start_token_id`, GPT-2's by the next
    position. Labels of -100 have no weight."""
    task, params, batch = made("t5")
    sizes = dict(num_layers=1, num_heads=2, d_model=16, d_kv=8, d_ff=32, vocab_size=task.model.vocab_size)
    count = np.random.default_rng(4).integers(1, 7, (8, 1))
    batch["weights"] = jnp.asarray(np.arange(6) < count, jnp.float32)
    inputs = {name: tensor(batch[name])[:6].long() for name in ("input_ids", "attention_mask")}
    theirs = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=9))
    theirs = load_into(theirs, t5.table(task.model), params).eval()
    labels = tensor(jnp.where(batch["weights"] > 0, batch["targets"], -100))[:6].long()
    wanted = float(theirs(**inputs, labels=labels).loss.detach())
    assert evaluated(task, params, batch) == pytest.approx(wanted, rel=1e-5)
    task, params, batch = made("decoder")
    sizes = dict(n_positions=24, n_embd=16, n_layer=1, n_head=2, n_inner=32, vocab_size=task.model.vocab_size)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    theirs = load_into(theirs, gpt2.table(1), params).eval()
    inputs = {name: tensor(batch[name])[:6].long() for name in ("input_ids", "attention_mask")}
    labels = jnp.where(batch["weights"][:, :-1] > 0, batch["input_ids"][:, 1:], -100)
    labels = F.pad(tensor(labels)[:6].long(), (1, 0), value=-100)
    wanted = float(theirs(**inputs, labels=labels).loss.detach())
    assert evaluated(task, params, batch) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
def test_a_teacher_as_torch():
    """T² KL(teacher ‖ student), labels and layers; no gradient flows into the teacher."""
    teacher, theirs, batch = made("classes")
    student = DistilledClassification(
        model=Bert(**SIZES, **POSITIONS), teacher="T", temperature=2.0, hard_weight=0.3,
        layer_weight=1.0, teacher_hidden_size=16, **LABELS,
    ).bind(VOCABULARY, 24)
    constants = student.load_constants(student.vocabulary, lambda path: PretrainedModel(teacher, theirs))
    params = jax.jit(student.init)(jax.random.key(4))

    def loss(constants):
        terms = student.with_constants(constants).loss(params, batch, jax.random.key(0), False)
        return total_loss(terms), terms

    flow, terms = jax.jit(jax.grad(loss, has_aux=True))(constants)
    ours = tensor(predicted(student, params, batch)["logits"])[:6]
    target = tensor(predicted(teacher, theirs, batch)["logits"])[:6]
    soft = 4 * F.kl_div(F.log_softmax(ours / 2, -1), F.softmax(target / 2, -1), reduction="batchmean")
    assert float(terms["soft_loss"].total / terms["soft_loss"].weight) == pytest.approx(float(soft), rel=1e-4)
    assert terms["task_loss"].coefficient == pytest.approx(0.3)
    assert {"hidden_loss", "attention_loss"} <= terms.keys()
    assert all(float(jnp.abs(leaf).max()) == 0 for leaf in jax.tree.leaves(flow))
    # A teacher whose classes stand in another order teaches the same.
    order = [2, 0, 1]
    turned = dataclasses.replace(teacher, labels=tuple(teacher.labels[i] for i in order))
    head = theirs | {"classifier": jax.tree.map(lambda x: x[..., jnp.array(order)], theirs["classifier"])}
    other = student.load_constants(student.vocabulary, lambda path: PretrainedModel(turned, head))
    again = jax.jit(student.bind(VOCABULARY, 24, None, other).loss, static_argnums=3)(params, batch, None, False)
    assert float(again["soft_loss"].total) == pytest.approx(float(terms["soft_loss"].total), rel=1e-5)
    # With layers the student runs once: its logits follow from the layers' states.
    class Once(Bert):
        def hidden_states(self, *_, **__):
            raise AssertionError

    once = dataclasses.replace(student, model=student.model.as_type(Once), soft_weight=0.0).with_constants(constants)
    seen = {}
    jax.eval_shape(lambda p: seen.update(once.loss(p, batch, jax.random.key(0), True)), params)
    assert seen["task_loss"].coefficient == student.hard_weight


def test_a_teacher_of_numbers_and_the_weight_of_its_layers_as_the_formula():
    """Rows that fill up a batch count in no term; hidden states have a mean over tokens and their elements, scores one
    over heads and pairs of tokens (Jiao et al. 2019, equations 7 and 8)."""
    teacher, theirs, batch = made("numbers")
    student = DistilledClassification(
        model=teacher.model, teacher="T", target="number", temperature=2.0, classifier_dropout=0.0, layer_weight=0.7,
        soft_weight=0.4, hard_weight=0.3, teacher_hidden_size=16,
    ).bind(VOCABULARY, 24)
    params = jax.tree.map(jnp.asarray, random_params(student, 4, std=0.3))
    student = student.with_constants(student.load_constants(VOCABULARY, lambda path: PretrainedModel(teacher, theirs)))

    @jax.jit
    def run(params, theirs, batch):
        outputs = [task.predict(weights, batch)["logits"][:6, 0] for task, weights in ((student, params),
                                                                                       (teacher, theirs))]
        states = [teacher.model.layer_states(weights, Inputs.of(batch)) for weights in (params, theirs)]
        return student.loss(params, batch, jax.random.key(0), False), outputs, states

    terms, (ours, target), ((hidden, scores), (their_hidden, their_scores)) = jax.device_get(run(params, theirs, batch))
    mask, head = np.asarray(batch["attention_mask"])[:6], jax.device_get(params["projection_to_teacher"])
    errors = np.square(hidden @ head["kernel"] + head.get("bias", 0) - their_hidden)[:, :6].mean(-1).sum(0)
    squares = np.square(scores - their_scores)[:, :6].mean(axis=2).sum(0)
    wanted = {
        "task_loss": np.mean(np.square(ours - np.asarray(batch["label"])[:6])), "soft_loss": np.mean(
            np.square(ours - target)), "hidden_loss": np.sum(errors * mask) / mask.sum(),
        "attention_loss": np.sum(squares * mask[:, None] * mask[..., None]) / np.sum(mask.sum(1) ** 2),
    }
    assert {name: terms[name].total / terms[name].weight for name in wanted} == pytest.approx(wanted, rel=1e-4)
    weights = {"task_loss": 0.3, "soft_loss": 0.4, "hidden_loss": 0.7, "attention_loss": 0.7}
    assert {name: terms[name].coefficient for name in wanted} == pytest.approx(weights)
    assert sum(weights[name] * wanted[name] for name in wanted) == pytest.approx(float(total_loss(terms)), rel=1e-4)


@pytest.mark.parametrize(("family", "pooling"), first_fast([
    (ModernBert, "mean"), (ModernBert, "cls"), (EuroBert, "late"), (EuroBert, "mean"), (EuroBert, "bos"),
]))
def test_a_student_that_is_its_teacher_has_its_logits_with_layers_too(family, pooling):
    sizes = SIZES | dict(num_layers=2, max_positions=24, init_std=0.3, classifier_pooling=pooling)
    model = family(**sizes | (dict(num_kv_heads=1, head_dim=8) if family is EuroBert else {}))
    teacher = Classification(model=model, **LABELS).bind(VOCABULARY, 24)
    student = DistilledClassification(model=model, teacher="T", layer_weight=1.0, teacher_hidden_size=16, **LABELS)
    student = student.bind(VOCABULARY, 24)
    params, batch = jax.tree.map(jnp.asarray, random_params(student)), made("classes")[2]
    constants = student.load_constants(student.vocabulary, lambda path: PretrainedModel(teacher, params))

    @jax.jit
    def terms(params, batch):
        return student.with_constants(constants).loss(params, batch, jax.random.key(0), False)

    found = terms(params, batch)
    assert float(found["attention_loss"].total) == pytest.approx(0, abs=1e-6)
    assert float(found["soft_loss"].total) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(("family", "kind", "count"), [
    (Bert, Classification, 1), (Roberta, Classification, 2), (Electra, Classification, 2), (Roberta, MultipleChoice, 1),
])
def test_dropout_around_the_dense_layer_is_that_of_transformers(family, kind, count, monkeypatch):
    """RobertaClassificationHead and ElectraClassificationHead drop its inputs, too; their multiple choice does not."""
    rates = []
    monkeypatch.setattr("jaxlm.tasks.base.dropout", lambda x, rate, key: rates.append(rate) or x)
    pooler = {"kernel": jnp.eye(16), "bias": jnp.zeros(16)}
    task = kind(model=family(), classifier_dropout=0.2)
    task.before_classifier({"pooler": pooler}, jnp.ones((2, 16)), jax.random.key(0))
    assert rates == [0.2] * count


def test_no_answer_follows_the_passage_in_a_decoder_whose_tokenizer_begins_texts():
    """Llama 3's and Gemma's folders put a begin symbol before each text, and nothing after the last one."""
    begins = dataclasses.replace(VOCABULARY, single=f"#{VOCABULARY.bos} $A", pair="#5 $A #5 $B:1")
    for vocabulary, pair in ((begins, "#5 $A #5 $B:1 eos"), (VOCABULARY, "$A eos $B eos")):
        assert Answers(model=Llama()).template_for(vocabulary).pair == pair


def test_the_projection_of_layer_distillation_goes_on():
    """As TinyBERT's: both stages have one projection, of a teacher of the same width."""
    general = LayerDistillation(model=Bert(**SIZES), teacher="T", teacher_hidden_size=24).bind_unchecked(VOCABULARY)
    source = PretrainedModel(general, random_params(general))
    for width, is_kept in ((24, True), (32, False)):
        student = DistilledClassification(
            model=general.model, teacher="T", layer_weight=1.0, teacher_hidden_size=width, **LABELS)
        found = student.select_params(source).get("projection_to_teacher")
        assert (found is source.params["projection"]) == is_kept


WRONG_TEACHERS = {
    "not fine-tuned on the labels a, b, c: it has a, b;": dict(labels=("a", "b")),
    "12 positions (the student 24); choose another teacher": dict(model=Bert(**SIZES, max_positions=12)),
    "rows with a pair in both orders": dict(both_orders=True),
    "several labels per row": dict(target="labels"),
    "other special tokens around its texts": dict(model=Roberta(**SIZES, **POSITIONS)),
    "another vocabulary": dict(vocabulary=Vocabulary.stand_in(170)),
}


@pytest.mark.parametrize("message", WRONG_TEACHERS)
def test_an_unsuitable_teacher_is_refused(message):
    student = DistilledClassification(model=Distilbert(**SIZES, **POSITIONS), teacher="T", **LABELS)
    teacher = Classification(model=Bert(**SIZES, **POSITIONS), **LABELS).bind_unchecked(VOCABULARY)
    loaded = student.load_constants(VOCABULARY, lambda path: PretrainedModel(teacher, {}))
    assert loaded.objective.model.hidden_size == 16
    assert student.bind(VOCABULARY, 24, None, loaded).constants is loaded
    with pytest.raises(UserError, match=re.escape(message)):
        wrong = dataclasses.replace(teacher, **WRONG_TEACHERS[message])
        loaded = student.load_constants(VOCABULARY, lambda path: PretrainedModel(wrong, {}))
        student.bind(VOCABULARY, 24, None, loaded)


def test_several_labels_are_not_distilled():
    with pytest.raises(UserError, match="and target class or number"):
        DistilledClassification(target="labels")


def test_the_rows_of_a_distilbert_have_segments_for_a_bert():
    bert, distilbert = (Classification(model=model) for model in (Bert(), Distilbert()))
    ids = np.arange(150, 154)
    rows = [task.template_for(VOCABULARY).build(VOCABULARY, ids, ids) for task in (bert, distilbert)]
    assert rows[0].segments.any() and all(map(np.array_equal, *rows))


def test_only_the_same_task_keeps_a_head():
    params = {"classifier": 1, "encoder": 2}
    fields = dict(model=Bert(), labels=("a", "b"))
    task, distilled = Classification(**fields), DistilledClassification(**fields)
    assert task.select_params(PretrainedModel(distilled, params)) == params
    assert distilled.select_params(PretrainedModel(task, params)) == params
    for other in (Classification(model=Bert(), labels=("a", "c")), Tagging(**fields), MaskedLM(model=Bert())):
        assert task.select_params(PretrainedModel(other, params)) == {"encoder": 2}


@pytest.mark.slow
def test_logits_of_a_bfloat16_model_are_float32():
    task, params, batch = made("classes")
    task = dataclasses.replace(task, model=dataclasses.replace(task.model, dtype="bfloat16"))
    logits = predicted(task, params, batch)["logits"]
    assert logits.dtype == jnp.float32 and (logits != logits.astype(jnp.bfloat16)).any()


@pytest.mark.parametrize("task", [Classification(), Tagging(), TextToText()])
def test_a_task_needs_a_model_and_labels(task):
    with pytest.raises(UserError, match="--init-from"):
        require_model(Experiment(objective=task))
    if not isinstance(task, TextToText):
        with pytest.raises(UserError, match="this task has no labels"):
            dataclasses.replace(task, model=Bert(**SIZES, **POSITIONS)).init(jax.random.key(0))


def test_words_are_spelt_once():
    assert spell(VOCABULARY) is spell(Vocabulary.stand_in(160, ["[START]", "[DELIMITER]", "[EXTRACT]"]))


def test_equal_tasks_share_encoded_rows():
    first, second = (
        dataclasses.replace(TASKS["decoder"], kind=Classification(**LABELS)).bind(VOCABULARY, 24) for _ in range(2)
    )
    assert first is not second and first == second and hash(first) == hash(second)
