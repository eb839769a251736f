"""Keys of different purposes: no two draws of a run share one."""

from __future__ import annotations

import itertools

import jax
import numpy as np

from jaxlm.keys import Purpose, purpose_key
from jaxlm.training.program import corruption_key, dropout_key


def test_no_two_purposes_share_a_key():
    """Initialization splits its key; all others fold numbers into theirs and split the result."""
    key = jax.random.key(3)
    assert jax.random.split(key, 8)[5] == jax.random.fold_in(key, 5), "why there is a purpose"

    def numbered(purpose: Purpose):
        return lambda seed, number: jax.random.fold_in(purpose_key(seed, purpose), number)

    def words(keys) -> list[tuple[int, int]]:
        return [tuple(pair) for pair in np.asarray(jax.random.key_data(keys)).reshape(-1, 2).tolist()]

    derived = (corruption_key, dropout_key, numbered(Purpose.EVALUATION), numbered(Purpose.GENERATION))
    found: list[tuple[int, int]] = []
    for seed in (0, 1):
        found += words(purpose_key(seed, Purpose.INITIALIZATION))
        found += words(jax.random.split(purpose_key(seed, Purpose.INITIALIZATION), 64))
        for key_of, number in itertools.product(derived, range(12)):
            found += words(key_of(seed, number)) + words(jax.random.split(key_of(seed, number), 8))
    assert len(set(found)) == len(found) == 2 * (65 + 4 * 12 * 9)
