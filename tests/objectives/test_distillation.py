"""Distillation: loss terms of PyTorch, masks of rare tokens, initialization of the student, unsuitable teachers."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxlm.data.base import Statistics
from jaxlm.errors import UserError
from jaxlm.models.albert import Albert
from jaxlm.models.base import Inputs
from jaxlm.models.bert import Bert
from jaxlm.models.deberta import Deberta
from jaxlm.models.distilbert import Distilbert
from jaxlm.models.electra import ElectraEncoder
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.llama import Llama
from jaxlm.models.modernbert import ModernBert
from jaxlm.models.roberta import Roberta
from jaxlm.models.rotary_bert import Gte, NomicBert
from jaxlm.objectives.base import total_loss
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.chunked_loss import chunked_divergence
from jaxlm.objectives.distillation import Distillation
from jaxlm.objectives.layer_distillation import LayerDistillation
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import TokenBatch
from tests.params import first_fast, random_params

VOCABULARY = Vocabulary.stand_in(160)
SIZES = dict(hidden_size=16, num_heads=2, intermediate_size=32, max_positions=32, init_std=0.2, dropout=0.0,
             attention_dropout=0.0)
LENGTH = 24
LLAMA = Llama(vocab_size=160, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8,
              intermediate_size=32)


@functools.cache
def teacher(layers: int = 2, **changes) -> PretrainedModel:
    objective = MaskedLM(model=Bert(**(SIZES | dict(num_layers=layers) | changes))).bind(VOCABULARY, LENGTH)
    return PretrainedModel(objective, jax.tree.map(jnp.asarray, random_params(objective, 7, 0.2)))


def student(layers: int = 1, statistics=None, **changes) -> Distillation:
    model = Distilbert(**SIZES, num_layers=layers)
    return Distillation(model=model, teacher="somewhere", **changes).bind(VOCABULARY, LENGTH, statistics)


def rows(count: int = 6, seed: int = 0) -> TokenBatch:
    rng = np.random.default_rng(seed)
    real = np.arange(LENGTH - 2) < rng.integers(4, LENGTH - 1, count)[:, None]
    tokens = np.where(real, rng.integers(107, 160, (count, LENGTH - 2)), 0)
    return TokenBatch(jnp.asarray(tokens, jnp.int32), jnp.asarray(real, jnp.int32))


@pytest.mark.parametrize("chunk", first_fast([1, 4, 100]))
def test_divergence_is_torchs_and_so_are_its_gradients(chunk):
    rng = np.random.default_rng(0)

    def head(seed):
        return [rng.normal(size=shape).astype(np.float32) for shape in ((2, 7, 8), (30, 8), (30,))]

    ours, theirs, weights = head(0), head(1), rng.integers(0, 2, (2, 7)).astype(np.float32)
    other, asked = tuple(map(jnp.asarray, theirs)), jnp.asarray(weights)
    found, gradients = jax.value_and_grad(lambda ours: 0.5 * chunked_divergence(ours, other, asked, 2.0, chunk=chunk))(
        tuple(map(jnp.asarray, ours))
    )

    own = [torch.from_numpy(x).requires_grad_() for x in ours]
    chosen = torch.from_numpy(weights) > 0

    def logits(features, table, bias):
        return (features @ table.T + bias)[chosen] / 2

    expected = 0.5 * 4 * torch.nn.functional.kl_div(
        logits(*own).log_softmax(-1), logits(*map(torch.from_numpy, theirs)).softmax(-1), reduction="sum"
    )
    expected.backward()
    assert float(found) == pytest.approx(expected.item(), rel=1e-5)
    for a, b in zip(gradients, own, strict=True):
        np.testing.assert_allclose(a, b.grad.numpy(), rtol=1e-4, atol=1e-5)

    def slopes(bias):  # None: a model of the Llama line has no bias
        heads = [(*map(jnp.asarray, each[:2]), bias) for each in (ours, theirs)]
        return jax.grad(lambda ours: chunked_divergence(ours, heads[1], asked, 2.0, chunk=chunk))(heads[0])

    for a, b in zip(slopes(None)[:2], slopes(jnp.zeros(30))[:2], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_terms_are_those_of_torch():
    """Sanh et al. 2019, section 3, with the weights of the released code: 5, 2 and 1."""
    objective, loaded = student(), teacher()
    params = random_params(objective, 0, 0.2)
    example = jax.device_get(jax.jit(objective.corrupt)(jax.random.key(1), rows()))
    example = {name: np.array(value) for name, value in example.items()}

    @jax.jit
    def both(params, example):
        ids, mask = example["input_ids"], example["attention_mask"]
        hidden = [m.hidden_states(p, Inputs(ids, mask=mask)) for m, p in (
            (objective.model, params), (loaded.objective.model, loaded.params))]
        logits = [m.predict_tokens(p, h) for m, p, h in (
            (objective.model, params, hidden[0]), (loaded.objective.model, loaded.params, hidden[1]))]
        return *hidden, *logits, objective.with_constants(loaded).loss(params, example, jax.random.key(2), False)

    *arrays, terms = jax.device_get(both(params, example))
    real = torch.from_numpy(example["attention_mask"]) > 0
    ours, theirs, logits, their_logits = (torch.from_numpy(np.array(x))[real] for x in arrays)
    soft = torch.nn.KLDivLoss(reduction="batchmean")((logits / 2).log_softmax(-1), (their_logits / 2).softmax(-1)) * 4
    cosine = torch.nn.CosineEmbeddingLoss()(ours, theirs, torch.ones(len(ours)))
    labels = torch.full(example["input_ids"].shape, -100)
    for row, slot in zip(*np.nonzero(example["masked_weights"]), strict=True):
        labels[row, example["masked_positions"][row, slot]] = int(example["masked_labels"][row, slot])
    mlm = torch.nn.functional.cross_entropy(logits, labels[real])
    for name, expected in (("soft_loss", soft), ("cosine_loss", cosine), ("mlm_loss", mlm)):
        assert float(terms[name].total / terms[name].weight) == pytest.approx(expected.item(), rel=1e-4), name
    assert float(total_loss(terms)) == pytest.approx((5 * soft + 2 * mlm + cosine).item(), rel=1e-4)


def test_rare_tokens_are_masked_more_as_torch_multinomial_draws():
    """Reference: torch.multinomial without replacement over max(count, 1)^-0.7, 0 for symbols and [UNK]."""
    counts = np.zeros(160, np.int64)
    counts[107:160] = np.arange(53) ** 3  # one token that does not occur in the training split
    objective = student(statistics=Statistics(counts, 0.0))
    ids = np.array([107, 108, 110, 115, 120, 130, 140, 150, 155, 159] * 2 + [VOCABULARY.unk])
    count, size = 4000, len(ids)
    batch = TokenBatch(jnp.tile(ids.astype(np.int32), (count, 1)), jnp.ones((count, size), jnp.int32))
    example = jax.device_get(jax.jit(objective.corrupt)(jax.random.key(0), batch))
    assert (example["masked_weights"].sum(1) == round(0.15 * (size + 2))).all()
    chosen = np.zeros(size + 2)
    np.add.at(chosen, example["masked_positions"][example["masked_weights"] > 0], 1)
    assert chosen[0] == chosen[-1] == 0  # [CLS] and [SEP]
    torch.manual_seed(0)
    weights = torch.from_numpy(np.maximum(counts[ids], 1.0) ** -0.7 * (ids != VOCABULARY.unk))
    drawn = torch.multinomial(weights.expand(count, -1), round(0.15 * (size + 2)))
    expected = np.bincount(drawn.numpy().ravel(), minlength=size)
    deviation = np.sqrt(expected * (1 - expected / count) + 1)
    assert np.abs(chosen[1:-1] - expected).max() < 6 * deviation.max()
    assert np.all(np.abs(chosen[1:-1] - expected) < 6 * deviation)
    assert expected.max() > 5 * expected[:-1].min()  # the weights have an effect
    assert chosen[-2] == 0  # [UNK]
    # 80 % masked, 10 % unchanged, 10 % random.
    labels, shown = example["masked_labels"], np.take_along_axis(example["input_ids"], example["masked_positions"], 1)
    assert np.mean(shown == VOCABULARY.mask) == pytest.approx(0.8, abs=0.02)
    assert np.mean(shown == labels) == pytest.approx(0.1 + 0.1 / 160, abs=0.015)


def test_the_student_begins_with_layers_of_its_teacher():
    objective = student(layers=3)
    loaded = objective.load_constants(objective.vocabulary, lambda path: teacher(layers=5))
    assert set(loaded.params) == {"embeddings", "encoder", "mlm_head"}
    fresh = random_params(objective)
    params = objective.with_constants(loaded).merge_pretrained(fresh, None)
    assert jax.tree.structure(params) == jax.tree.structure(fresh) and "token_type" not in params["embeddings"]
    for own, theirs in ((0, 0), (1, 2), (2, 4)):
        jax.tree.map(
            lambda a, b, own=own, theirs=theirs: np.testing.assert_array_equal(a[own], b[theirs]),
            params["encoder"]["layers"], loaded.params["encoder"]["layers"],
        )
    jax.tree.map(np.testing.assert_array_equal, params["mlm_head"], loaded.params["mlm_head"])
    alone = student(layers=3, copy_layers=False).with_constants(loaded)
    assert alone.merge_pretrained(fresh, None) is fresh
    # Six of twelve layers, as in the released code; a pretrained model takes precedence over the teacher.
    assert np.linspace(0, 11, 6).round().astype(int).tolist() == [0, 2, 4, 7, 9, 11]
    assert objective.merge_pretrained(fresh, PretrainedModel(objective, fresh)) == fresh


@pytest.mark.slow
def test_a_student_that_is_its_teacher_has_no_distance_and_the_teacher_no_gradient():
    objective = dataclasses.replace(student(), model=teacher(layers=1).objective.model)
    loaded = objective.load_constants(objective.vocabulary, lambda path: teacher(layers=1))
    example = jax.jit(objective.corrupt)(jax.random.key(2), rows())

    @jax.jit
    def terms_and_gradients(params, frozen):
        def loss(params, frozen):
            taught = objective.with_constants(PretrainedModel(loaded.objective, frozen))
            terms = taught.loss(params, example, jax.random.key(3), False)
            return total_loss(terms), terms
        (_, terms), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, frozen)
        return terms, gradients

    terms, (ours, theirs) = terms_and_gradients(loaded.params, loaded.params)
    assert float(terms["soft_loss"].total) < 1e-3 and float(terms["cosine_loss"].total) < 1e-3
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(theirs)) and np.any(ours["mlm_head"]["bias"])


def test_flops():
    """The student's head runs at every token (Sanh et al. 2019, section 3); the teacher's forward pass counts once."""
    objective = Distillation()
    trained = objective.flops(512)
    loaded = PretrainedModel(MaskedLM(), {})
    expected = 2 * (3 * trained + Bert().forward_flops(512, 512))
    assert objective.bind_unchecked(Vocabulary.stand_in(30522), constants=loaded).step_flops(512, 2) == expected


@pytest.mark.parametrize(
    ("loaded", "words"),
    [
        (teacher(layers=1), r"num_layers 1 \(the student 2\); add --objective.model.num-layers 1"),
        (teacher(hidden_size=32), r"hidden_size 32 \(the student 16\)"),
        (PretrainedModel(teacher().objective, {"embeddings": {}, "encoder": {}}), "has no mlm_head"),
        (
            PretrainedModel(
                dataclasses.replace(teacher().objective, vocabulary=Vocabulary.stand_in(161)), teacher().params
            ),
            r"another vocabulary, .*; add --data.tokenizer somewhere",
        ),
        (PretrainedModel(CausalLM(model=Gpt2()).bind_unchecked(VOCABULARY), {}), "is a Gpt2; choose an encoder"),
        (dataclasses.replace(teacher(), objective=dataclasses.replace(teacher().objective, predicts_next=True)),
         "has no predictions of masked tokens at their own positions; choose another teacher"),
        (PretrainedModel(CausalLM(model=LLAMA).bind(VOCABULARY, LENGTH), LLAMA.init(jax.random.key(0))),
         "has no predictions of masked tokens at their own positions"),
    ],
)
def test_teachers_that_do_not_suit(loaded, words):
    with pytest.raises(UserError, match=words) as error:
        student(layers=2).load_constants(VOCABULARY, lambda path: loaded)
    assert "\n" not in str(error.value)


def test_all_mismatches_are_one_message_whose_flags_make_the_student_fit():
    wide = teacher(hidden_size=32, num_heads=4, intermediate_size=48, max_positions=40)
    with pytest.raises(UserError) as error:
        student(layers=3).load_constants(VOCABULARY, lambda path: wide)
    found = re.findall(r"--objective\.model\.([\w-]+) (\d+)", str(error.value))
    changes = {name.replace("-", "_"): int(value) for name, value in found}
    assert changes == dict(hidden_size=32, num_heads=4, intermediate_size=48, max_positions=40, num_layers=2)
    fitting = dataclasses.replace(student(), model=dataclasses.replace(student().model, **changes))
    loaded = fitting.load_constants(fitting.vocabulary, lambda path: wide)
    begun = fitting.with_constants(loaded).merge_pretrained(random_params(fitting), None)
    assert begun["embeddings"]["word"]["embedding"].shape[1] == 32


def of_family(family, **changes) -> PretrainedModel:
    model = family(**SIZES | changes, num_layers=2, vocab_size=192)
    own = MaskedLM(model=model, input_format="document").bind_unchecked(VOCABULARY)
    return PretrainedModel(own, jax.eval_shape(model.init, jax.random.key(0)))


def shape_of_loss(objective, constants) -> tuple[int, ...]:
    params = jax.eval_shape(objective.init, jax.random.key(0))

    def loss(params, constants, batch):
        example = objective.corrupt(jax.random.key(1), batch)
        return total_loss(objective.with_constants(constants).loss(params, example, jax.random.key(2), True))

    return jax.eval_shape(loss, params, constants, rows()).shape


@pytest.mark.parametrize("family", [Roberta, Gte, NomicBert, Deberta, ModernBert, Albert])
def test_a_teacher_of_another_family_gives_no_layers_and_teaches_a_fresh_student(family):
    loaded, model = of_family(family), Distilbert(**SIZES, num_layers=1, vocab_size=192)
    objective = Distillation(model=model, teacher="somewhere").bind(VOCABULARY, LENGTH)
    with pytest.raises(UserError, match=r"has no \S+ of the student's shape; add --objective\.copy-layers False, or"):
        objective.load_constants(VOCABULARY, lambda path: loaded)
    fresh = dataclasses.replace(objective, copy_layers=False)
    assert shape_of_loss(fresh, fresh.load_constants(VOCABULARY, lambda path: loaded)) == ()


def test_a_teacher_without_segments_or_with_fewer_positions_fits_by_its_layers():
    segments = Bert(**SIZES, num_layers=1, vocab_size=192)
    objective = Distillation(model=segments, teacher="somewhere").bind(VOCABULARY, LENGTH)
    assert objective.load_constants(VOCABULARY, lambda path: of_family(Distilbert))
    short = of_family(Distilbert, max_positions=LENGTH // 2)
    with pytest.raises(UserError, match=r"add --objective\.model\.max-positions \d+, or choose another"):
        objective.load_constants(VOCABULARY, lambda path: short)


def test_a_fresh_student_without_the_cosine_learns_from_a_wider_teacher():
    wide = teacher(hidden_size=32, num_heads=8, intermediate_size=48)
    with pytest.raises(UserError, match=r"it has hidden_size 32 \(the student 16\); add --objective"):
        student(layers=3, copy_layers=False).load_constants(VOCABULARY, lambda path: wide)
    objective = student(layers=3, copy_layers=False, cosine_weight=0.0)
    loaded = objective.load_constants(VOCABULARY, lambda path: wide)
    params = jax.tree.map(jnp.asarray, random_params(objective))

    @jax.jit
    def step(params):
        def loss(params):
            example = objective.corrupt(jax.random.key(1), rows())
            terms = objective.with_constants(loaded).loss(params, example, jax.random.key(2), True)
            return total_loss(terms), terms

        gradients, terms = jax.grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda leaf, slope: leaf - 0.01 * slope, params, gradients), terms

    params, before = step(params)
    after = step(params)[1]
    assert "cosine_loss" not in before and float(total_loss(after)) < float(total_loss(before))


@pytest.mark.parametrize(("family", "changes"), [(Albert, {}), (ElectraEncoder, {"embedding_size": 8})])
def test_a_teacher_with_narrow_embeddings_teaches_its_layers(family, changes):
    objective = LayerDistillation(
        model=Bert(**SIZES, num_layers=1, vocab_size=192), teacher="somewhere", teacher_hidden_size=16
    ).bind(VOCABULARY, LENGTH)
    loaded = objective.load_constants(VOCABULARY, lambda path: of_family(family, **changes))
    assert "mlm_head" not in loaded.params and shape_of_loss(objective, loaded) == ()
    # As a student it keeps the projection of its embeddings.
    learner = dataclasses.replace(objective, model=of_family(family, **changes).objective.model)
    assert shape_of_loss(learner, loaded) == ()


def test_another_tokenizer_of_the_same_size_is_another_vocabulary():
    real = dataclasses.replace(VOCABULARY, is_stand_in=False)
    other = dataclasses.replace(real, word_start=~real.word_start)
    loaded = PretrainedModel(dataclasses.replace(teacher().objective, vocabulary=other), teacher().params)
    with pytest.raises(UserError, match="another vocabulary"):
        student().load_constants(real, lambda path: loaded)


@pytest.mark.parametrize(
    ("changes", "words"),
    [(dict(temperature=0.0), "temperature is 0.0"),
     (dict(rarity=-1.0), "rarity is -1.0")],
)
def test_mistakes_are_one_sentence(changes, words):
    with pytest.raises(UserError, match=words):
        student(**changes)


def test_rare_tokens_are_masked_alone():
    with pytest.raises(UserError, match=r"objective\.rarity masks single tokens"):
        dataclasses.replace(student(), whole_word=True).bind(VOCABULARY, LENGTH)


def test_without_a_teacher_nothing_can_be_distilled():
    with pytest.raises(UserError, match=r"--objective\.teacher"):
        Distillation(model=Distilbert(**SIZES)).load_constants(VOCABULARY, lambda path: teacher())
