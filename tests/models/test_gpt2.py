"""GPT-2: published sizes, causality, and reading a prompt token by token."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.errors import UserError
from jaxlm.models.base import Inputs, document_positions
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.layers.multi_head import Visibility
from jaxlm.models.layers.stack import unstack
from tests.params import first_fast

SMALL = Gpt2(vocab_size=61, hidden_size=24, num_layers=3, num_heads=3, intermediate_size=40, max_positions=48)


def random_params(model, seed=0):
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.2, leaf.shape), jnp.float32), shapes)


@functools.partial(jax.jit, static_argnums=0)
def run(model, params, ids, segment_ids):
    return model.predict_tokens(params, model.hidden_states(params, Inputs(ids, documents=segment_ids)))


def logits(model, params, ids, segment_ids=None):
    """Return logits [rows, length, vocab]; rows are padded to 24 tokens on the right for a single compilation."""
    fill = ((0, 0), (0, 24 - ids.shape[1]))
    segment_ids = None if segment_ids is None else jnp.asarray(np.pad(segment_ids, fill))
    return np.asarray(run(model, params, jnp.asarray(np.pad(ids, fill)), segment_ids))[:, : ids.shape[1]]


@pytest.mark.parametrize(("size", "parameters", "without_embeddings"), first_fast([
    ("small", 124_439_808, 85_056_000), ("medium", 354_823_168, 302_311_424),
    ("large", 774_030_080, 708_390_400), ("xl", 1_557_611_200, 1_475_561_600),
]))
def test_parameter_counts(size, parameters, without_embeddings):
    shapes = jax.eval_shape(Gpt2.published(size).init, jax.random.key(0))
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    embeddings = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes["embeddings"]))
    assert (count, count - embeddings) == (parameters, without_embeddings)


@pytest.mark.slow  # test_modernbert.py has another
def test_initialization():
    """0.02, 0.01 for positions (openai/gpt-2, model.py), 0.02 / √(2 layers) into the residual stream (section 2.3)."""
    model = Gpt2(vocab_size=500, hidden_size=128, num_layers=8, num_heads=2, intermediate_size=512)
    params = jax.jit(model.init)(jax.random.key(0))
    layer = unstack(params["decoder"]["layers"])[7]
    wanted = {
        0.02: [params["embeddings"]["word"]["embedding"], layer["attention"]["query"]["kernel"],
               layer["mlp"]["wi"]["kernel"]],
        0.01: [params["embeddings"]["position"]["embedding"]],
        0.02 / 4: [layer["attention"]["out"]["kernel"], layer["mlp"]["wo"]["kernel"]],
    }
    for std, arrays in wanted.items():
        for array in arrays:
            assert np.std(array) == pytest.approx(std, rel=0.02)
            assert np.max(np.abs(array)) > 3 * std  # a normal distribution, not truncated
    plain = dataclasses.replace(model, residual_init_scale=1.0)
    other = jax.jit(plain.init)(jax.random.key(0))
    assert np.std(unstack(other["decoder"]["layers"])[7]["mlp"]["wo"]["kernel"]) == pytest.approx(0.02, rel=0.02)


def test_positions_restart_in_each_document():
    segments = jnp.array([[1, 1, 1, 2, 2, 3, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]])
    wanted = [[0, 1, 2, 0, 1, 0, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7]]
    assert document_positions(segments).tolist() == wanted


def test_causality():
    params = random_params(SMALL)
    ids = np.random.default_rng(1).integers(0, 61, (2, 11)).astype(np.int32)
    changed = ids.copy()
    changed[:, 6] = (changed[:, 6] + 1) % 61
    before, after = logits(SMALL, params, ids), logits(SMALL, params, changed)
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert np.abs(before[:, 6:] - after[:, 6:]).max(axis=-1).min() > 1e-3


def test_packed_documents_have_the_logits_of_separate_rows():
    params, rng = random_params(SMALL), np.random.default_rng(2)
    documents = [rng.integers(0, 61, n).astype(np.int32) for n in (5, 1, 9, 3)]
    row = np.concatenate([*documents, np.zeros(4, np.int32)])[None]
    segments = np.repeat([1, 2, 3, 4, 0], [5, 1, 9, 3, 4]).astype(np.int32)[None]
    packed = logits(SMALL, params, row, segments)[0]
    start = 0
    for document in documents:
        alone = logits(SMALL, params, document[None])[0]
        np.testing.assert_allclose(packed[start : start + len(document)], alone, atol=2e-5)
        start += len(document)
    joined = logits(SMALL, params, row)[0]
    assert np.abs(joined[5:18] - packed[5:18]).max() > 0.1  # the plain stream differs


class Alibi(Gpt2):
    """Has a bias that falls with distance (Press et al. 2021), one parameter per head, and no sight of 3 tokens ago."""

    def init(self, key):
        return super().init(key) | {"slopes": jnp.ones(self.num_heads)}

    def visibility(self, params, queries, keys):
        far = queries[:, None] - keys
        return {"mask": (far != 3)[None, None], "bias": -jnp.abs(params["slopes"])[None, :, None, None] * far}

    def _run_tokens(self, params, ids, positions, shared, **options):
        if "caches" not in options:
            places = jnp.arange(ids.shape[1])
            shared = shared._replace(visible=shared.visible._replace(**self.visibility(params, places, places)))
        return super()._run_tokens(params, ids, positions, shared, **options)

    def visible_slots(self, params, filled, queries):
        own = self.visibility(params, queries, jnp.arange(filled.shape[1]))
        mask = super().visible_slots(params, filled, queries).mask
        return Visibility(mask=mask & own["mask"], bias=own["bias"])


@pytest.mark.parametrize("model", [SMALL, Alibi(**dataclasses.asdict(SMALL))], ids=["gpt2", "alibi"])
def test_cached_decoding_has_the_same_logits(model):
    """Prompts of different lengths, padded on the left, then single tokens through the cache."""
    params, rng = random_params(model), np.random.default_rng(3)
    rows = [rng.integers(0, 61, n).astype(np.int32) for n in (12, 8, 5)]  # the last four of each are read one by one
    prompts, mask = np.zeros((3, 10), np.int32), np.zeros((3, 10), bool)
    for i, row in enumerate(rows):
        prompts[i, 10 - len(row) + 4 :], mask[i, 10 - len(row) + 4 :] = row[:-4], True
    seen = []
    out, state = jax.jit(model.prefill, static_argnums=3)(params, jnp.asarray(prompts), jnp.asarray(mask), 6)
    decode = jax.jit(model.decode)
    shapes = jax.tree.map(jnp.shape, state)
    for step in range(4):
        seen.append(np.asarray(out))
        tokens = jnp.array([row[len(row) - 4 + step] for row in rows])
        out, state = decode(params, tokens, state)
        assert jax.tree.map(jnp.shape, state) == shapes
    seen.append(np.asarray(out))
    for i, row in enumerate(rows):
        whole = logits(model, params, row[None])[0]
        np.testing.assert_allclose(np.stack([s[i] for s in seen]), whole[-5:], atol=2e-5)


@pytest.mark.slow
def test_remat_does_not_change_gradients():
    ids = jnp.asarray(np.random.default_rng(4).integers(0, 61, (2, 7)))

    def gradients(model):
        def total(p):
            return jnp.sum(jnp.square(model.hidden_states(p, Inputs(ids))))

        return jax.jit(jax.grad(total))(random_params(SMALL))

    plain, recomputed = gradients(SMALL), gradients(Gpt2(**{**SMALL.__dict__, "remat": "full"}))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), plain, recomputed)


def test_dropout_needs_a_key():
    model = Gpt2(**{**SMALL.__dict__, "dropout": 0.3, "attention_dropout": 0.3})
    params, ids = random_params(model), jnp.arange(6)[None]
    run = jax.jit(model.hidden_states)
    plain = run(params, Inputs(ids))
    np.testing.assert_array_equal(plain, jax.jit(SMALL.hidden_states)(params, Inputs(ids)))
    dropped = run(params, Inputs(ids), key=jax.random.key(1))
    assert np.abs(dropped - plain).max() > 0.1


@pytest.mark.parametrize(("changes", "words"), [
    ({"num_heads": 5}, "768 is not divisible by num_heads 5"), ({"num_layers": 0}, "num_layers is 0"),
    ({"dropout": 1.0}, "dropout is 1.0"), ({"norm_eps": 0.0}, r"norm_eps is 0.0; it must be in \(0, inf\)"),
])
def test_invalid_configurations(changes, words):
    with pytest.raises(UserError, match=words):
        Gpt2(**changes)
