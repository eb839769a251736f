"""Parameters of a larger vocabulary."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.config.presets import load_preset
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.trees import VOCABULARY_AXES, extend_vocabulary, get, leaves, merge_params, with_mean_rows

PRESETS = sorted((Path(__file__).parents[1] / "configs").glob("*_tiny.py"))


FAST = ("bert_tiny", "elmo_tiny", "t5_tiny")


@pytest.mark.parametrize("preset", [
    pytest.param(path, marks=() if path.stem in FAST else pytest.mark.slow, id=path.stem) for path in PRESETS
])
def test_every_vocabulary_axis_grows(preset):
    """They are the axes whose lengths change with the vocabulary."""
    objective = load_preset(str(preset)).objective
    small, large = (
        jax.eval_shape(
            dataclasses.replace(objective, model=objective.model.for_vocabulary(Vocabulary.stand_in(size))).init,
            jax.random.key(0),
        )
        for size in (7001, 7900)
    )
    found = {}
    for path in leaves(small):
        shapes = get(small, path).shape, get(large, path).shape
        if shapes[0] != shapes[1]:
            (found[path],) = (axis for axis, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1)
    named = {path: VOCABULARY_AXES.get("/".join(f"/{path}".split("/")[-2:])) for path in leaves(small)}
    assert found == {path: axis for path, axis in named.items() if axis is not None}
    merged = jax.eval_shape(lambda own, source: merge_params(own, extend_vocabulary(source, own)), large, small)
    assert merged == large


def test_the_values_of_new_tokens_are_fresh():
    def params(size: int, value: float) -> dict:
        return {"lm_head": {"kernel": jnp.full((2, size), value), "bias": jnp.full(size, value)}}

    merged = merge_params(params(5, 0.0), extend_vocabulary(params(3, 1.0), params(5, 0.0)))
    for leaf in jax.tree.leaves(merged):
        assert (leaf == jnp.array([1.0, 1.0, 1.0, 0.0, 0.0])).all()


def test_mean_rows_of_both_tables_and_the_bias():
    """Rows 4 and 5 had no token; a table of entities is no table of the vocabulary."""
    rng = np.random.default_rng(0)
    params = {
        "shared": {"embedding": rng.normal(size=(6, 3)).astype(np.float32)},
        "lm_head": {"kernel": rng.normal(size=(3, 6)).astype(np.float32), "bias": np.arange(6, dtype=np.float32)},
        "entity": {"embedding": np.ones((7, 3), np.float32)}, "dense": {"kernel": np.ones((6, 6), np.float32)},
    }
    groups = [(0, 1), (1, 2, 3), (2,), (0,)]
    grown = with_mean_rows(params, rows=6, start=4, groups=groups)
    table, kernel = params["shared"]["embedding"], params["lm_head"]["kernel"]
    for i, group in enumerate(groups):
        rows = sum(table[j] for j in group) / len(group), sum(kernel[:, j] for j in group) / len(group)
        np.testing.assert_allclose(grown["shared"]["embedding"][4 + i], rows[0], rtol=0, atol=1e-7)
        np.testing.assert_allclose(grown["lm_head"]["kernel"][:, 4 + i], rows[1], rtol=0, atol=1e-7)
    np.testing.assert_array_equal(grown["lm_head"]["bias"], [0, 1, 2, 3, 0.5, 2, 2, 0])
    np.testing.assert_array_equal(grown["shared"]["embedding"][:4], table[:4])
    assert grown["entity"]["embedding"].shape == (7, 3)
    assert grown["dense"]["kernel"].shape == (6, 6) and grown["lm_head"]["kernel"].dtype == np.float32
