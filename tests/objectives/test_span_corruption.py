"""T5's objective against a slow version; its contract with the training loop, `show` and generation."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.corruption.spans import span_lengths
from jaxlm.data.base import RowFormat
from jaxlm.errors import UserError
from jaxlm.inference.generate import generate, prepare_prompts
from jaxlm.models.layers.stack import unstack
from jaxlm.models.t5 import T5, relative_buckets
from jaxlm.objectives.base import total_loss
from jaxlm.objectives.span_corruption import SpanCorruption
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import TokenBatch

VOCABULARY = Vocabulary.stand_in(200)
OLD = T5(hidden_size=12, num_layers=2, num_heads=2, head_dim=4, intermediate_size=16)
NEW = dataclasses.replace(OLD, activation="gated-gelu", tied_head=False, scaled_head=False, num_decoder_layers=1)


def bound(model: T5 = OLD, length: int = 20, vocabulary: Vocabulary = VOCABULARY, **changes) -> SpanCorruption:
    return SpanCorruption(model=model, **changes).bind(vocabulary, length)


def text(raw: int, sizes: list[int], seed: int = 0) -> TokenBatch:
    real = np.arange(raw)[None, :] < np.array(sizes)[:, None]
    tokens = np.where(real, np.random.default_rng(seed).integers(107, 200, (len(sizes), raw)), 0)
    return TokenBatch(jnp.asarray(tokens, jnp.int32), jnp.asarray(real, jnp.int32))


def slow_loss(m: T5, params, example, z_loss: float):
    """Compute the formulas of the paper one row, layer, head and target token at a time."""

    def norm(x, scale):
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    def attention(p, x, memory, bias, allowed):
        out = 0
        for h in range(m.num_heads):
            part = slice(h * m.head_dim, (h + 1) * m.head_dim)
            q, k, v = x @ p["query"]["kernel"][:, part], *(memory @ p[n]["kernel"][:, part] for n in ("key", "value"))
            scores = q @ k.T + (0 if bias is None else bias[h])
            weights = jnp.exp(jnp.where(allowed, scores, -1e30))
            out += (weights / weights.sum(-1, keepdims=True)) @ v @ p["out"]["kernel"][part]
        return out

    def feed_forward(p, x):
        if "wi" in p:
            inner = jnp.maximum(x @ p["wi"]["kernel"], 0)
        else:
            gate = x @ p["wi_0"]["kernel"]
            inner = 0.5 * gate * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
            inner = inner * (x @ p["wi_1"]["kernel"])
        return inner @ p["wo"]["kernel"]

    def bias(table, length, bidirectional):
        positions = np.arange(length)
        buckets = relative_buckets(positions[None, :] - positions[:, None], bidirectional)
        return jnp.moveaxis(table["embedding"][buckets], -1, 0)

    def stack(p, layers, x, table, bidirectional, memory=None):
        length = len(x)
        allowed = np.ones((length, length), bool) if bidirectional else np.tri(length, dtype=bool)
        for layer in unstack(p["layers"])[:layers]:
            y = norm(x, layer["attention_norm"]["scale"])
            x = x + attention(layer["attention"], y, y, bias(table, length, bidirectional), allowed)
            if memory is not None:
                y = norm(x, layer["cross_attention_norm"]["scale"])
                x = x + attention(layer["cross_attention"], y, memory, None, True)
            x = x + feed_forward(layer["mlp"], norm(x, layer["mlp_norm"]["scale"]))
        return norm(x, p["final_norm"]["scale"])

    total, count = 0.0, 0
    for row in range(len(example["labels"])):
        ids = example["input_ids"][row][: int(example["attention_mask"][row].sum())]
        labels = example["labels"][row][: int(example["weights"][row].sum())]
        if not len(labels):
            continue
        x = params["shared"]["embedding"][ids]
        memory = stack(params["encoder"], m.num_layers, x, params["encoder_bias"], True)
        shifted = np.array([0, *labels[:-1]])
        x = params["shared"]["embedding"][shifted]
        hidden = stack(params["decoder"], m.decoder_layers, x, params["decoder_bias"], False, memory)
        for place, label in enumerate(labels):
            if m.tied_head:
                scores = params["shared"]["embedding"] @ (hidden[place] / math.sqrt(m.hidden_size))
            else:
                scores = hidden[place] @ params["lm_head"]["kernel"]
            log_z = jnp.log(jnp.sum(jnp.exp(scores)))
            total += log_z - scores[label] + z_loss * log_z**2
            count += 1
    return total / count


@pytest.mark.parametrize("model, changes", [
    (OLD, dict(z_loss=0.01)), pytest.param(NEW, dict(task="prefix", loss_chunk=3), marks=pytest.mark.slow)
])
def test_loss_and_gradients_are_those_of_the_formulas(model, changes):
    objective = bound(model, 10, **changes)
    params = jax.jit(objective.init)(jax.random.key(0))
    batch = text(objective.row_format(10).length, [objective.row_format(10).length, 4, 1])
    example = jax.jit(objective.corrupt)(jax.random.key(1), batch)
    run = jax.jit(jax.value_and_grad(lambda p: total_loss(objective.loss(p, example, jax.random.key(2), False))))
    loss, gradients = run(params)
    numbers = jax.tree.map(np.asarray, example)
    slow = jax.jit(jax.value_and_grad(lambda p: slow_loss(objective.model, p, numbers, objective.z_loss)))
    expected, expected_gradients = slow(params)
    assert float(loss) == pytest.approx(float(expected), abs=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), gradients, expected_gradients)
    assert all(np.abs(g).max() > 1e-5 for g in jax.tree.leaves(gradients))


def test_what_the_decoder_reads_and_writes():
    objective = bound(length=20)
    raw = objective.row_format(20).length
    batch = text(raw, [raw, 9, 1, 0])
    example = jax.tree.map(np.asarray, jax.jit(objective.corrupt)(jax.random.key(1), batch))
    lengths = objective.lengths(20)
    assert example["input_ids"].shape == (4, 20) == example["attention_mask"].shape
    assert example["labels"].shape == (4, lengths.targets) == example["weights"].shape
    np.testing.assert_array_equal(example["decoder_input_ids"][:, 0], 0)
    np.testing.assert_array_equal(example["decoder_input_ids"][:, 1:], example["labels"][:, :-1])
    np.testing.assert_array_equal(example["attention_mask"], example["input_ids"] > 0)
    np.testing.assert_array_equal(example["weights"], example["labels"] > 0)
    assert (example["weights"].sum(1)[:2] > 0).all() and not example["weights"][2:].any()


@pytest.mark.slow
def test_rows_without_text_and_padding_carry_no_loss():
    objective = bound(length=20)
    raw = objective.row_format(20).length
    params = jax.jit(objective.init)(jax.random.key(0))
    run = jax.jit(lambda e: objective.loss(params, e, jax.random.key(0), False))
    example = jax.jit(objective.corrupt)(jax.random.key(1), text(raw, [raw, 9, 0, 1]))
    terms = run(example)
    loss = total_loss(terms)
    first = {name: x.at[2:].set(x[:2]) for name, x in example.items()}  # each row twice: the same mean
    np.testing.assert_allclose(total_loss(run(first)), loss, rtol=1e-5)
    assert set(terms) == {"span_loss", "span_accuracy"}
    np.testing.assert_allclose(terms["span_loss"].total / terms["span_loss"].weight, loss, rtol=1e-6)
    assert terms["span_loss"].weight == example["weights"].sum() == terms["span_accuracy"].weight
    changed = example | {
        "labels": jnp.where(example["weights"] > 0, example["labels"], 150),
        "input_ids": jnp.where(example["attention_mask"] > 0, example["input_ids"], 150),
    }
    np.testing.assert_array_equal(total_loss(run(changed)), loss)
    terms = run(jax.jit(objective.corrupt)(jax.random.key(1), text(raw, [0, 0])))
    assert float(total_loss(terms)) == 0 and float(terms["span_loss"].weight) == 0


@pytest.mark.slow
def test_z_loss_stays_out_of_the_reported_loss():
    raw = bound(length=20).row_format(20).length
    results = []
    for z_loss in (0.0, 0.1):
        objective = bound(length=20, z_loss=z_loss)
        params = jax.jit(objective.init)(jax.random.key(0))
        example = jax.jit(objective.corrupt)(jax.random.key(1), text(raw, [raw] * 2))
        results.append(jax.jit(lambda e, o=objective, p=params: o.loss(p, e, jax.random.key(0), True))(example))
    plain, more = results
    assert total_loss(more) > total_loss(plain) + 0.1
    np.testing.assert_allclose(plain["span_loss"], more["span_loss"], rtol=1e-6)
    assert "z_loss" not in plain
    assert float(total_loss(more) - total_loss(plain)) == pytest.approx(
        float(more["z_loss"].total / more["z_loss"].weight), rel=1e-4
    )


@pytest.mark.parametrize("size, length, task, expected", [
    ("1.1-small", 512, "spans", 35.4e9), ("1.1-base", 512, "spans", 142.0e9), ("1.1-large", 512, "spans", 489.3e9),
    ("1.1-xl", 512, "spans", 1.782e12), ("base", 512, "spans", 142.0e9), ("base", 512, "prefix", 257.2e9),
])
def test_operations_are_the_published_ones(size, length, task, expected):
    objective = SpanCorruption(model=T5.published(size), task=task)
    assert objective.flops(length) == pytest.approx(expected, rel=6e-4)


def test_binding_sets_the_rows():
    assert bound(length=20).model.vocab_size == 256
    assert bound(vocabulary=Vocabulary.stand_in(32_100)).model.vocab_size == 32_128
    exact = dataclasses.replace(OLD, vocab_size=200)  # an imported model with an unpadded vocabulary
    assert bound(exact).model.vocab_size == 200
    assert bound(length=512).row_format(512) == RowFormat("packed", 568)
    assert bound(length=512, task="prefix").row_format(512) == RowFormat("packed", 512)


@pytest.mark.parametrize("make, sentence", [
    (lambda: bound(length=3), "data.length 3 is too short for one span"),
    (lambda: bound(length=2, task="prefix"), "data.length 2 is too short for a prefix and a continuation"),
    (lambda: bound(vocabulary=dataclasses.replace(VOCABULARY, sentinel=-1, num_sentinels=0)),
     "a stand-in vocabulary of 200 has no <extra_id_0>, which span corruption needs"),
    (lambda: bound(vocabulary=dataclasses.replace(VOCABULARY, eos=-1), task="prefix"),
     "has no </s>, which prefix language modelling needs"),
    (lambda: bound(length=2048), "data.length 2048 needs 114 sentinels but a stand-in vocabulary of 200 has 100"),
    (lambda: bound(noise_density=1.0), "objective.noise_density is 1.0; it must be in (0, 1)."),
    (lambda: bound(noise_density=0.0), "objective.noise_density is 0.0; it must be in (0, 1)."),
    (lambda: bound(mean_span=0.5), "objective.mean_span is 0.5; it must be in [1, inf)."),
    (lambda: bound(z_loss=-1.0), "objective.z_loss is -1.0; it must be in [0, inf)."),
    (lambda: bound(loss_chunk=-1), "objective.loss_chunk is -1; it must be in [0, inf)."),
])
def test_mistakes_are_told_in_one_sentence(make, sentence):
    with pytest.raises(UserError) as caught:
        make()
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("task", ["spans", "prefix"])
def test_show_tells_text_input_and_target(task):
    objective = bound(length=30, task=task)
    raw = objective.row_format(30).length
    batch = text(raw, [raw, 12, 0])
    example = jax.jit(objective.corrupt)(jax.random.key(1), batch)
    for row, size in enumerate([raw, 12]):
        whole, shown, target = objective.describe(batch, example, row)
        assert whole.ids == batch.tokens[row][:size].tolist()
        assert shown.ids == [i for i in example["input_ids"][row].tolist() if i]
        assert target.ids == [i for i in example["labels"][row].tolist() if i]
        assert target.title == f"target {len(target.ids)}"
        assert all(len(line.ids) == len(line.marks) for line in (whole, shown, target))
        # The marked tokens are those of the target, the others those of the input.
        taken = [i for i, mark in zip(whole.ids, whole.marks, strict=True) if mark == "span"]
        assert taken == [i for i, mark in zip(target.ids, target.marks, strict=True) if mark == "target"]
        kept = [i for i, mark in zip(whole.ids, whole.marks, strict=True) if not mark]
        assert kept == [i for i, mark in zip(shown.ids, shown.marks, strict=True) if not mark]
        spans = 0 if task == "prefix" else span_lengths(size).spans
        assert shown.marks.count("masked") == target.marks.count("masked") == spans
        assert shown.marks[-1] == target.marks[-1] == "special"
    (empty,) = objective.describe(batch, example, 2)
    assert empty.ids == []


@pytest.mark.slow  # tests/huggingface/test_t5.py compares continuations
def test_generation_reads_the_end_symbol_and_writes_only_tokens():
    objective = bound(NEW, 20, Vocabulary.stand_in(130))
    assert objective.model.vocab_size == 256
    assert prepare_prompts(objective, [[120], [121, 3]], 5) == [[120, 3], [121, 3]]
    params = jax.jit(objective.init)(jax.random.key(0))
    params["lm_head"]["kernel"] = params["lm_head"]["kernel"].at[:, 130:].multiply(100.0)  # rows of no token
    rows = generate(objective, params, [[120], [121, 122, 123]], max_new_tokens=6, stop_ids=[])
    assert [len(row) for row in rows] == [6, 6] and max(map(max, rows)) < 130
