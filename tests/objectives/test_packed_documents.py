"""Packed rows of masked language modelling: the documents in them are as in rows of their own."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxlm.corruption.masking import mask_tokens
from jaxlm.errors import UserError
from jaxlm.models.albert import Albert
from jaxlm.models.base import Inputs
from jaxlm.models.bert import Bert
from jaxlm.models.llama import EuroBert
from jaxlm.models.modernbert import ModernBert
from jaxlm.models.roberta import Roberta
from jaxlm.models.rotary_bert import NomicBert
from jaxlm.objectives.base import total_loss
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import TokenBatch

LENGTH, V = 48, Vocabulary.stand_in(200)
DOCUMENTS = [(9, 1, 14, 13), (46,), (20, 20), ()]
"""Tokens of text of the documents of each row."""
# At BERT's own std of 0.02 a foreign document hardly moves the hidden states.
SIZES = dict(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64, max_positions=LENGTH, init_std=0.2,
             dropout=0.0, attention_dropout=0.0)
MODELS = {
    "bert": Bert(**SIZES), "roberta": Roberta(**SIZES), "albert": Albert(**SIZES, embedding_size=16),
    "modernbert": ModernBert(**SIZES | dict(num_layers=4), local_attention=8),
    "eurobert": EuroBert(**SIZES, num_kv_heads=1, head_dim=16, rope_theta=100.0),
    "nomic_bert": NomicBert(**SIZES, rope_theta=100.0),
}


def batch(documents=DOCUMENTS, copies: int = 1) -> TokenBatch:
    """Return packed rows of random text."""
    sizes = [[*row, LENGTH - 2 - sum(row)] for row in documents]
    segments = np.array([np.repeat([*range(1, len(row)), 0], row) for row in sizes]).repeat(copies, axis=0)
    tokens = np.random.default_rng(0).integers(107, 200, segments.shape)
    return TokenBatch(np.where(segments > 0, tokens, 0).astype(np.int32), segments.astype(np.int32))


@functools.cache
def corrupted(mask_rate: float = 0.3) -> tuple[MaskedLM, dict]:
    objective = MaskedLM(model=MODELS["bert"], input_format="packed", mask_rate=mask_rate).bind(V, LENGTH)
    return objective, jax.device_get(jax.jit(objective.corrupt)(jax.random.key(1), batch()))


def separate(example: dict) -> dict:
    """Return each document of packed rows as a row of its own."""
    made = []
    for row, documents in enumerate(example["documents"]):
        for number in range(1, documents.max() + 1):
            columns = np.flatnonzero(documents == number)
            used = np.isin(example["masked_positions"][row], columns) & (example["masked_weights"][row] > 0)
            ids = np.zeros(LENGTH, np.int32)
            ids[: len(columns)] = example["input_ids"][row, columns]
            made.append({
                "input_ids": ids, "token_type_ids": np.zeros_like(ids),
                "attention_mask": (np.arange(LENGTH) < len(columns)).astype(np.int32),
                "masked_positions": np.where(used, example["masked_positions"][row] - columns[0], 0),
                "masked_labels": example["masked_labels"][row], "masked_weights": used.astype(np.float32),
            })
    return {name: np.stack([row[name] for row in made]) for name in made[0]}


def test_rows_have_symbols_around_each_document():
    _, example = corrupted()
    original = example["input_ids"].copy()
    for row, (positions, labels, weights) in enumerate(
        zip(*(example[f"masked_{name}"] for name in ("positions", "labels", "weights")), strict=True)
    ):
        original[row, positions[weights > 0]] = labels[weights > 0]
    text = batch().tokens
    for row, sizes in enumerate(DOCUMENTS):
        expected, documents, at = [], [], 0
        for number, size in enumerate(sizes, 1):
            expected += [V.cls, *text[row, at : at + size], V.sep]
            documents += [number] * (size + 2)
            at += size
        fill = [0] * (LENGTH - len(expected))
        assert original[row].tolist() == expected + fill
        assert example["documents"][row].tolist() == documents + fill
    assert (example["attention_mask"] == (example["documents"] > 0)).all()


@pytest.mark.parametrize("name", [
    "bert", *(pytest.param(name, marks=pytest.mark.slow)
              for name in ("roberta", "modernbert", "albert", "eurobert", "nomic_bert"))
])
def test_packed_documents_are_as_in_rows_of_their_own(name):
    """Hidden states, loss and all gradients, where the last layer runs at masked positions only, and where not."""
    objective, example = corrupted()
    objective = MaskedLM(model=MODELS[name], input_format="packed", mask_rate=0.3).bind(V, LENGTH)
    params, alone = jax.jit(objective.init)(jax.random.key(0)), separate(example)
    whole = dataclasses.replace(
        objective, model=dataclasses.replace(objective.model, last_layer_at_positions=False)
    )

    @functools.partial(jax.jit, static_argnums=0)
    def run(objective, example):
        hidden = objective.model.hidden_states(params, Inputs.of(example))
        loss = lambda params: total_loss(objective.loss(params, example, jax.random.key(0), False))  # noqa: E731
        return hidden, *jax.value_and_grad(loss)(params)

    hidden, loss, gradients = run(objective, example)
    hidden_alone, loss_alone, gradients_alone = run(whole, alone)
    at = 0
    for row, documents in enumerate(example["documents"]):
        for number in range(1, documents.max() + 1):
            found = hidden[row][documents == number]
            np.testing.assert_allclose(found, hidden_alone[at][: len(found)], atol=1e-5)
            at += 1
    np.testing.assert_allclose(loss, loss_alone, atol=1e-5)
    for ours, theirs in zip(*map(jax.tree.leaves, (gradients, gradients_alone)), strict=True):
        # The sums over the tokens are in another order: 1e-5 of the largest gradient, which is above 1.
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * max(1.0, np.abs(theirs).max()))
    joined = jax.jit(objective.model.hidden_states)(params, Inputs.of(example)._replace(documents=None))
    assert np.abs(joined - hidden)[0, :40].max() > 0.1  # one row of all documents differs


def chi_square(counts, probabilities) -> float:
    """Return the p-value of counts of categories."""
    return scipy.stats.chisquare(counts, np.asarray(probabilities) * np.sum(counts)).pvalue


def masks_of(example: dict, length: int) -> np.ndarray:
    """Return the mask of predicted positions."""
    found = np.zeros((len(example["masked_weights"]), length + 1), bool)
    positions = np.where(example["masked_weights"] > 0, example["masked_positions"], length)
    found[np.arange(len(found))[:, None], positions] = True
    return found[:, :length]


def theirs(objective: MaskedLM, size: int, copies: int) -> np.ndarray:
    """Return the masks of a document of `size` tokens in rows of its own, by `mask_tokens`."""
    ids = jnp.tile(jnp.asarray([V.cls, *[150] * size, V.sep], jnp.int32), (copies, 1))
    made = jax.jit(lambda key: mask_tokens(
        key, ids, jnp.asarray(V.special), mask=V.mask, attention_mask=jnp.ones_like(ids), rate=objective.mask_rate,
        slots=objective.num_slots(LENGTH), random_ids=V.text_ids, round_randomly=True,
    ))(jax.random.key(size))
    return masks_of(jax.device_get(made)._asdict(), size + 2)[:, 1:-1]


@pytest.mark.slow
def test_masks_and_targets_have_the_law_of_rows_of_one_document():
    """Chi-square against the formulas, and against `mask_tokens` on the same documents in rows of their own.

    A document of n tokens, symbols included, has floor(0.3 n + u) targets, every set of them equally likely; 80 % of
    them are [MASK], 10 % uniform over text tokens, 10 % unchanged.
    """
    copies, sizes = 20_000, (9, 1, 5, 13)
    objective = MaskedLM(model=MODELS["bert"], input_format="packed", mask_rate=0.3).bind(V, LENGTH)
    example = jax.device_get(jax.jit(objective.corrupt)(jax.random.key(5), batch([sizes], copies)))
    weights, packed = example["masked_weights"] > 0, masks_of(example, LENGTH)
    start, p_values = 0, []
    for size in sizes:
        n = size + 2
        own = packed[:, start + 1 : start + 1 + size]
        assert not packed[:, [start, start + n - 1]].any()
        start += n
        low, part = divmod(0.3 * n, 1)
        law = np.zeros(size + 1)
        law[int(low)] += 1 - part
        law[min(int(low) + 1, size)] += part
        used, counts = law > 1e-9, np.bincount(own.sum(axis=1), minlength=size + 1)
        assert counts[~used].sum() == 0
        p_values += [chi_square(counts[used], law[used]), chi_square(own.sum(axis=0), np.full(size, 1 / size))]
        if size == 5:  # every set of two tokens
            alone = theirs(objective, size, copies)
            sets, their_sets = (np.bincount(x @ (1 << np.arange(size)), minlength=1 << size) for x in (own, alone))
            assert (sets > 0).sum() == 10 + 10  # of two and of three tokens
            pairs = np.array([i.bit_count() == 2 for i in range(1 << size)])
            p_values.append(chi_square(sets[pairs], np.full(10, 1 / 10)))
            p_values.append(scipy.stats.chi2_contingency(np.stack([sets, their_sets])[:, sets > 0]).pvalue)
    labels = example["masked_labels"]
    found = np.take_along_axis(example["input_ids"], example["masked_positions"], axis=1)
    masked, kept = weights & (found == V.mask), weights & (found == labels)
    other = weights & ~masked & ~kept
    text = V.text_ids[1] - V.text_ids[0]
    assert ((found >= V.text_ids[0]) & (found < V.text_ids[1]) | masked)[weights].all()
    shares = [0.8, 0.1 + 0.1 / text, 0.1 - 0.1 / text]
    p_values.append(chi_square([masked.sum(), kept.sum(), other.sum()], shares))
    # Uniform without the label, so their difference is uniform, too.
    shifts = np.bincount((found - labels)[other] % text)[1:]
    p_values.append(chi_square(shifts, np.full(text - 1, 1 / (text - 1))))
    assert min(p_values) > 1e-3, sorted(p_values)[:3]
    assert weights.sum(axis=1).max() <= objective.num_slots(LENGTH)


def test_rules_that_need_a_row_are_refused():
    for changes in (dict(whole_word=True), dict(longest_ngram=3), dict(max_predictions=4)):
        with pytest.raises(UserError, match="packed masks single tokens"):
            MaskedLM(model=MODELS["bert"], input_format="packed", **changes).bind(V, LENGTH)


def test_show_describes_each_document():
    objective, example = corrupted()
    lines = objective.describe(batch(), example, 0)
    assert [line.title.split()[0] for line in lines] == ["text", "input", "predict"] * 4
    assert [line.title for line in lines[::3]] == [f"text {number}" for number in (1, 2, 3, 4)]
    assert [len(line.ids) for line in lines[::3]] == [size + 2 for size in DOCUMENTS[0]]
    text = [token for line in lines[::3] for token in line.ids if not V.special[token]]
    assert text == batch().tokens[0][: sum(DOCUMENTS[0])].tolist()
    used = example["masked_weights"][0] > 0
    assert [token for line in lines[2::3] for token in line.ids] == example["masked_labels"][0][used].tolist()
    assert objective.describe(batch(), example, 3) == []
