"""ELECTRA's objective: loss and gradients against PyTorch, gradient flow, statistics, invalid configurations."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.errors import UserError
from jaxlm.models.base import Inputs
from jaxlm.models.electra import Electra
from jaxlm.models.layers.stack import call
from jaxlm.objectives import chunked_loss
from jaxlm.objectives import replaced_tokens as module
from jaxlm.objectives.base import total_loss
from jaxlm.objectives.replaced_tokens import ReplacedTokens
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import TokenBatch
from tests.objectives.slow_electra import slow_loss

VOCABULARY = Vocabulary.stand_in(160)
TINY = Electra(
    embedding_size=12, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, generator_hidden_size=8,
    generator_num_layers=1, generator_num_heads=2, generator_intermediate_size=16, max_positions=128, init_std=0.2,
)


def bound(length: int = 40, **changes) -> ReplacedTokens:
    return dataclasses.replace(ReplacedTokens(model=TINY), **changes).bind(VOCABULARY, length)


def token_batch(rows: int, raw: int, seed: int = 0) -> TokenBatch:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, raw + 1, rows)
    sizes[0] = raw
    real = np.arange(raw)[None] < sizes[:, None]
    return TokenBatch(np.where(real, rng.integers(107, 160, (rows, raw)), 0).astype(np.int32), real.astype(np.int32))


def example_of(objective: ReplacedTokens, rows: int = 6, length: int = 40, seed: int = 1):
    return jax.device_get(
        jax.jit(objective.corrupt)(jax.random.key(seed), token_batch(rows, objective.row_format(length).length, seed))
    )


def init(objective: ReplacedTokens):
    return jax.jit(objective.init)(jax.random.key(0))


def terms_of(objective: ReplacedTokens, params, example):
    return jax.jit(lambda p, e: objective.loss(p, e, jax.random.key(3), False))(params, example)


def summed(objective: ReplacedTokens, train: bool = False):
    """Return a jitted (params, example) -> loss, terms."""
    def loss(params, example):
        terms = objective.loss(params, example, jax.random.key(3), train)
        return total_loss(terms), terms

    return loss


def scores(objective: ReplacedTokens, params, example) -> np.ndarray:
    """Return the discriminator's logits for the original text."""

    @jax.jit
    def run(params, ids, types, mask):
        m = objective.model
        hidden = m.discriminator.hidden_states(m.discriminator_params(params), Inputs(ids, types, mask))
        return call(m.replaced_head, params["rtd_head"], hidden)[..., 0]

    return np.asarray(run(params, example["original_ids"], example["token_type_ids"], example["attention_mask"]))


def guesses(example, right: float = 0.3, seed: int = 5) -> np.ndarray:
    """Return artificial samples, a share of them equal to the original."""
    rng = np.random.default_rng(seed)
    labels = example["masked_labels"]
    return np.where(rng.random(labels.shape) < right, labels, rng.integers(107, 160, labels.shape)).astype(np.int32)


@pytest.fixture
def fixed_samples(monkeypatch):
    def fix(samples):
        monkeypatch.setattr(chunked_loss, "sample_tokens", lambda uniform, logits, temperature: jnp.asarray(samples))

    return fix


@pytest.mark.parametrize(
    ("share", "changes"),
    [(True, {}), pytest.param(False, {"with_replacement": True, "two_segments": False}, marks=pytest.mark.slow),
     pytest.param(True, {"judge": "masked"}, marks=pytest.mark.slow)],
)
def test_loss_and_gradients_are_the_slow_versions(share, changes, fixed_samples):
    objective = bound(model=dataclasses.replace(TINY, share_embeddings=share), **changes)
    rng = np.random.default_rng(0)  # random biases and norms too: zeros and ones would hide a mix-up
    params = jax.tree.map(lambda x: x + 0.3 * rng.standard_normal(x.shape).astype(np.float32), init(objective))
    example = example_of(objective)
    # Half of the logits are above 0, so that both classes are predicted.
    params["rtd_head"]["score"]["bias"] -= np.median(scores(objective, params, example)[example["attention_mask"] > 0])
    samples = guesses(example)
    if objective.with_replacement:  # positions may repeat; their samples are equal here, so the mean is too
        samples = example["original_ids"][np.arange(6)[:, None], example["masked_positions"]] % 50 + 107
    fixed_samples(samples)
    value_and_grad = jax.jit(jax.value_and_grad(summed(objective), has_aux=True))
    (loss, terms), gradients = jax.device_get(value_and_grad(params, example))
    expected, facts, expected_gradients = slow_loss(objective, example, samples, jax.device_get(params))

    assert loss == pytest.approx(expected, rel=1e-5)
    scale = max(float(np.abs(g).max()) for g in jax.tree.leaves(expected_gradients))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * scale), gradients, expected_gradients)
    means = {name: term.total / term.weight for name, term in terms.items()}
    assert means["generator_loss"] == pytest.approx(facts["generator_loss"], rel=1e-5)
    assert means["discriminator_loss"] == pytest.approx(facts["discriminator_loss"], rel=1e-5)
    assert terms["generator_accuracy"][:2] == (facts["guessed"], facts["slots"])
    assert terms["discriminator_accuracy"][:2] == (facts["right"], facts["tokens"])
    assert terms["discriminator_precision"][:2] == (facts["both"], facts["suspected"])
    assert terms["discriminator_recall"][:2] == (facts["both"], facts["replaced"])
    assert 0 < facts["both"] < min(facts["suspected"], facts["replaced"])  # the figures above differ
    assert (facts["tokens"] == facts["slots"]) == (objective.judge == "masked")


def gradients_of(objective: ReplacedTokens, example):
    params = init(objective)
    return jax.jit(jax.grad(summed(objective, train=True), has_aux=True))(params, example)[0]


def largest(tree) -> float:
    return max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(tree))


@pytest.mark.slow  # the slow version's gradients say so too
def test_the_discriminators_loss_does_not_train_the_generator():
    objective = bound(model=dataclasses.replace(TINY, share_embeddings=False), generator_weight=0.0)
    gradients = gradients_of(objective, example_of(objective))
    assert largest(gradients["generator"]) == 0.0
    for name in ("discriminator", "rtd_head", "embeddings"):
        assert largest(gradients[name]) > 1e-4


@pytest.mark.slow  # the slow version's gradients say so too
def test_the_generators_loss_does_not_train_the_discriminator():
    objective = bound(model=dataclasses.replace(TINY, share_embeddings=False), discriminator_weight=0.0)
    gradients = gradients_of(objective, example_of(objective))
    for name in ("discriminator", "rtd_head", "embeddings"):
        assert largest(gradients[name]) == 0.0
    for name in ("encoder", "mlm_head", "embeddings"):
        assert largest(gradients["generator"][name]) > 1e-4


@pytest.mark.parametrize("right", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_right_guess_counts_as_original(right, fixed_samples):
    objective = bound()
    example = example_of(objective)
    fixed_samples(example["masked_labels"] if right else (example["masked_labels"] + 1))
    terms = terms_of(objective, init(objective), example)
    assert terms["discriminator_recall"].weight == (0 if right else example["masked_weights"].sum())


@pytest.mark.slow
def test_what_is_drawn_is_part_of_the_example():
    """The key drives dropout in training only; the numbers of the example decide the samples."""
    objective = bound()
    params, example = init(objective), jax.device_put(example_of(objective))
    loss = jax.jit(objective.loss, static_argnums=3)
    one, again = (loss(params, example, jax.random.key(seed), False) for seed in (0, 1))
    assert one == again
    redrawn = example | {"uniform": example["uniform"][:, ::-1]}
    other = loss(params, redrawn, jax.random.key(0), False)
    assert one["generator_loss"] == other["generator_loss"]
    assert one["discriminator_loss"] != other["discriminator_loss"]
    assert loss(params, example, jax.random.key(0), True)["generator_loss"] != one["generator_loss"]


@pytest.mark.slow
def test_rows_of_padding_carry_no_loss():
    objective = bound()
    batch = token_batch(4, objective.row_format(40).length)
    empty = TokenBatch(*(np.concatenate([x, np.zeros_like(x)]) for x in batch[:2]))
    params = init(objective)
    example = jax.jit(objective.corrupt)(jax.random.key(1), empty)
    assert not np.any(example["masked_weights"][4:]) and not np.any(example["attention_mask"][4:])
    terms = terms_of(objective, params, example)
    expected = terms_of(objective, params, jax.tree.map(lambda x: x[:4], example))
    for name in ("generator_loss", "discriminator_loss"):
        assert terms[name].weight == expected[name].weight
        assert terms[name].total == pytest.approx(float(expected[name].total), rel=1e-5)
    nothing = jax.tree.map(lambda x: x[4:], example)
    assert total_loss(terms_of(objective, params, nothing)) == 0


def reference_corruption(rng, ids: list[int], mask_rate: float, slots: int):
    """Corrupt one row by the reference recipe (google-research/electra), positions drawn without replacement."""
    v = VOCABULARY
    candidates = [p for p, token in enumerate(ids) if token not in (v.cls, v.sep, v.pad)]
    count = max(1, min(slots, round(mask_rate * len(ids))))
    chosen = rng.permutation(candidates)[:count]
    return chosen, [p for p in chosen if rng.random() < 0.85]


@pytest.mark.parametrize("size", [36, 20])
def test_selection_and_masking_against_a_reference(size):
    """Frequencies of chosen positions, of chosen neighbours and of masks; all other tokens stay unchanged."""
    rows, length = 4000, 40
    objective = bound(length, short_rate=0.0, single_rate=0.0)  # equal rows: these rates are tested below
    text = np.random.default_rng(0).integers(107, 160, size).astype(np.int32)
    tokens = np.zeros((rows, objective.row_format(length).length), np.int32)
    tokens[:, :size] = text
    batch = TokenBatch(tokens, (tokens > 0).astype(np.int32))
    example = jax.device_get(jax.jit(objective.corrupt)(jax.random.key(7), batch))

    v = VOCABULARY
    row = [v.cls, *text[: size // 2], v.sep, *text[size // 2 :], v.sep]
    types = [0] * (size // 2 + 2) + [1] * (size - size // 2 + 1)
    assert (example["original_ids"][:, : len(row)] == row).all() and not example["original_ids"][:, len(row) :].any()
    assert (example["token_type_ids"][:, : len(row)] == types).all()
    used = example["masked_weights"] > 0
    chosen = np.zeros((rows, length), bool)
    np.put_along_axis(chosen, example["masked_positions"], used, axis=1)  # unused slots hold False at position 0
    assert (chosen.sum(1) == used.sum(1)).all()
    masked = example["input_ids"] == v.mask
    assert not (masked & ~chosen).any()
    assert (example["input_ids"] == np.where(masked, v.mask, example["original_ids"])).all()  # never a random token

    rng = np.random.default_rng(1)
    expected_chosen, expected_masked = np.zeros((rows, length), bool), np.zeros((rows, length), bool)
    for r in range(rows):
        positions, hidden = reference_corruption(rng, row, 0.15, int(0.155 * length))
        expected_chosen[r, positions], expected_masked[r, hidden] = True, True
    assert (chosen.sum(1) == expected_chosen.sum(1)).all()
    for ours, theirs in (
        (chosen, expected_chosen), (masked, expected_masked), (chosen[:, :-1] & chosen[:, 1:], expected_chosen[:, :-1]
                                                               & expected_chosen[:, 1:]),
    ):
        p, q = ours.mean(0), theirs.mean(0)
        error = np.sqrt((p * (1 - p) + q * (1 - q)) / rows)
        assert (np.abs(p - q) <= 5 * error).all()
    assert abs(masked.sum() / chosen.sum() - 0.85) < 5 * np.sqrt(0.85 * 0.15 / chosen.sum())


@pytest.mark.slow
def test_some_rows_are_short_and_some_have_one_segment():
    """One row in 20 is short, one in ten has one segment (google-research/electra, build_pretraining_dataset.py)."""
    objective = bound()
    rows, raw = 8000, objective.row_format(40).length
    batch = TokenBatch(np.full((rows, raw), 120, np.int32), np.ones((rows, raw), np.int32))
    example = jax.device_get(jax.jit(objective.corrupt)(jax.random.key(3), batch))
    single = (example["original_ids"] == VOCABULARY.sep).sum(1) == 1
    short = (example["original_ids"] == 120).sum(1) < raw
    for found, rate in ((single, 0.1), (short, 0.05 * (raw - 5) / (raw - 4))):  # the full width may be drawn too
        assert abs(found.mean() - rate) < 4 * np.sqrt(rate * (1 - rate) / rows)


@pytest.mark.slow
def test_samples_replace_as_often_as_the_generator_errs(monkeypatch):
    """At a high temperature samples are uniform, so 1 in 160 is right; at a low one they are the generator's argmax."""
    seen = {}
    monkeypatch.setattr(
        module, "write_tokens", lambda ids, positions, weights, tokens: seen.update(tokens=tokens) or ids
    )
    example = example_of(bound(), rows=64)
    used = example["masked_weights"] > 0
    for temperature in (1e6, 1e-6):
        objective = bound(temperature=temperature)
        params = init(objective)

        def run(params, example, objective=objective):
            terms = objective.loss(params, example, jax.random.key(1), False)
            return terms, seen.pop("tokens")

        terms, tokens = jax.device_get(jax.jit(run)(params, example))
        right = (tokens == example["masked_labels"])[used].mean()
        if temperature > 1:
            assert len(np.unique(tokens)) > 100 and right < 0.05
        else:
            total, weight, _ = terms["generator_accuracy"]
            assert right == pytest.approx(float(total / weight))


@pytest.mark.slow  # corruption without the step: test_meshes.py
def test_same_on_every_mesh():
    """Identical corruption; on a fully sharded mesh, identical samples and equal loss and gradients up to rounding."""
    script = """
        import jax, numpy as np
        from jaxlm.parallel.mesh import MeshConfig, make_mesh
        from jaxlm.parallel.rules import batch_sharding, shardings
        from tests.objectives import test_replaced_tokens as t

        objective = t.bound()
        batch = t.token_batch(16, objective.row_format(40).length)
        host_params = jax.device_get(t.init(objective))
        examples, results = [], []
        for sizes, whole_step in (((1, 1, 1), True), ((8, 1, 1), False), ((2, 4, 1), False), ((2, 2, 2), True)):
            mesh = make_mesh(MeshConfig(*sizes), jax.devices()[:int(np.prod(sizes))])
            put = jax.device_put(batch, batch_sharding(mesh))
            example = jax.jit(lambda batch: objective.corrupt(jax.random.key(1), batch))(put)
            examples.append(jax.device_get(example))
            if not whole_step:
                continue

            def loss(params, example):
                with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                    return t.summed(objective)(params, example)

            params = jax.device_put(host_params, shardings(host_params, mesh))
            results.append(jax.device_get(jax.jit(jax.value_and_grad(loss, has_aux=True))(params, example)))
        for other in examples[1:]:
            for name in other:
                assert np.array_equal(examples[0][name], other[name]), name
        ((loss, terms), gradients), ((other_loss, other_terms), other_gradients) = results
        assert terms["discriminator_recall"].weight == other_terms["discriminator_recall"].weight > 30
        assert abs(loss - other_loss) < 1e-5 * abs(loss), (loss, other_loss)
        scale = max(np.abs(g).max() for g in jax.tree.leaves(gradients))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale), gradients, other_gradients)
        print("same")
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "same", done.stderr[-3000:]


@pytest.mark.parametrize(
    ("size", "length", "rate", "flops"),
    [("small", 128, 0.15, 2_994_671_104), ("base", 512, 0.15, 114_062_484_480), ("base", 128, 0.15, 26_064_245_760)],
)
def test_flops_of_published_sizes(size, length, rate, flops):
    assert ReplacedTokens(model=Electra.published(size), mask_rate=rate).flops(length) == flops


@pytest.mark.slow
def test_learns_to_tell_replacements():
    """A text of one repeated token: the generator learns it, and every other token is a replacement."""
    optax = pytest.importorskip("optax")
    objective = bound(model=dataclasses.replace(TINY, dropout=0.0, attention_dropout=0.0), temperature=3.0)
    raw = objective.row_format(40).length
    batch = TokenBatch(np.full((8, raw), 120, np.int32), np.ones((8, raw), np.int32))
    params = init(objective)
    optimizer = optax.adam(3e-3)

    def step(carry, key):
        params, state = carry
        example = objective.corrupt(jax.random.fold_in(key, 0), batch)
        (_, terms), gradients = jax.value_and_grad(summed(objective, train=True), has_aux=True)(params, example)
        updates, state = optimizer.update(gradients, state)
        return (optax.apply_updates(params, updates), state), terms

    keys = jax.random.split(jax.random.key(1), 80)
    _, terms = jax.jit(lambda carry: jax.lax.scan(step, carry, keys))((params, optimizer.init(params)))
    means = {name: np.asarray(term.total) / np.maximum(term.weight, 1) for name, term in terms.items()}
    assert means["generator_accuracy"][-1] > 0.99 and means["generator_loss"][0] > 4
    assert means["discriminator_recall"][-1] > 0.9 and means["discriminator_precision"][-1] > 0.9


def test_describe_shows_what_is_asked():
    objective = bound()
    batch = token_batch(3, objective.row_format(40).length)
    example = jax.device_get(jax.jit(objective.corrupt)(jax.random.key(1), batch))
    for row in range(3):
        text, shown, predict, judged = objective.describe(batch, example, row)
        real = int(example["attention_mask"][row].sum())
        assert len(text.ids) == len(shown.ids) == len(text.marks) == real and f"judges {real} tokens" in judged.title
        hidden = [i for i, mark in enumerate(shown.marks) if mark in ("masked", "kept")]
        assert predict.ids == [text.ids[i] for i in hidden] and predict.title == f"generator predicts {len(hidden)}"
        assert [i for i, mark in enumerate(text.marks) if mark == "target"] == hidden
        assert all((shown.ids[i] == VOCABULARY.mask) == (shown.marks[i] == "masked") for i in range(real))
        body = [i for i in text.ids if not VOCABULARY.special[i]]
        assert body == list(batch.tokens[row][batch.segment_ids[row] > 0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_rate": 0.0}, "mask_rate is 0.0"),
        ({"mask_share": 1.1}, "mask_share is 1.1"),
        ({"discriminator_weight": -1.0}, "discriminator_weight is -1.0"),
        ({"temperature": 0.0}, "temperature is 0.0"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(UserError, match=message):
        ReplacedTokens(**changes)


def test_bind_refuses():
    objective = ReplacedTokens(model=TINY)
    with pytest.raises(UserError, match="two_segments needs 2"):
        ReplacedTokens(model=Electra(type_vocab_size=1)).bind(VOCABULARY, 40)
    with pytest.raises(UserError, match=r"\[MASK\]"):
        objective.bind(dataclasses.replace(VOCABULARY, mask=-1), 40)
    with pytest.raises(UserError, match="129 is more than the model's 128"):
        objective.bind(VOCABULARY, 129)
    with pytest.raises(UserError, match="leaves no room"):
        objective.bind(VOCABULARY, 7)


@pytest.mark.slow
def test_token_logits_are_the_generators():
    objective = bound()
    params, example = init(objective), example_of(objective)
    ids, mask, positions = (jnp.asarray(example[name]) for name in ("input_ids", "attention_mask", "masked_positions"))

    @jax.jit
    def run(params):
        generator, own = objective.model.generator, objective.model.generator_params(params)
        full = generator.predict_tokens(own, generator.hidden_states(own, Inputs(ids, mask=mask)))
        return full, objective.model.token_logits(params, Inputs(ids, mask=mask), positions)

    full, found = jax.device_get(run(params))
    np.testing.assert_allclose(found, full[np.arange(6)[:, None], example["masked_positions"]], atol=1e-5)
