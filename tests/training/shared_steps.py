"""Runs of one process share their steps: to trace, lower and load those of a tiny run again is three quarters of it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

from jaxlm.keys import Purpose, purpose_key
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training import program as module
from jaxlm.training.program import Program


def identity(value: Any) -> Hashable:
    """Return what two values have in common exactly if they are equal; a vocabulary may have another name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if not (f.name == "name" and isinstance(value, Vocabulary))]
        return type(value), tuple(identity(getattr(value, name)) for name in names)
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, hashlib.sha256(np.ascontiguousarray(value)).hexdigest()
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(identity, value))
    if isinstance(value, dict):
        return tuple((key, identity(each)) for key, each in value.items())
    return type(value), value


def share_steps() -> None:
    """Make programs of equal parts use one jitted initialization, train step and evaluation step."""
    made: dict[Hashable, Any] = {}
    initialize, init_params = Program.__init__, Program.init_params
    make_train_step, make_eval_step = module.make_train_step, module.make_eval_step

    @functools.wraps(initialize)
    def initialized(self, objective, train, optimizer, mesh, phases=(), phase=None, run=None):
        # Without warm-up in shares, the steps of a constant schedule do not depend on their number.
        steps = None if optimizer.schedule == "constant" and optimizer.warmup_steps is not None else train.steps
        parts = (optimizer, steps, train.batch_size, train.accumulate, train.seed,
                 train.skip_nonfinite > 0, train.deterministic or train.replay_every > 0)
        # What a test has replaced belongs to the step, too; constants would be kept in memory.
        replaced = (module.gradients, module.corruption_key, module.dropout_key, module.make_optimizer)
        is_own = run is not None or len(jax.tree.leaves(objective.constants)) > 0
        self.key = None if is_own else (identity(objective), identity(parts), mesh, *replaced)
        initialize(self, objective, train, optimizer, mesh, phases, phase, run)

    def shared(program, kind, make):
        if program.key is None:
            return make()
        key = (kind, program.key)
        if key not in made:
            made[key] = make()
        return made[key]

    def init_of(program):
        return jax.jit(
            program.objective.init, out_shardings=program.shardings.params, compiler_options=program.compiler_options
        )

    @functools.wraps(init_params)
    def initial(self, seed):
        if self.key is None:
            return init_params(self, seed)
        return shared(self, "init", lambda: init_of(self))(purpose_key(seed, Purpose.INITIALIZATION))

    Program.__init__, Program.init_params = initialized, initial
    module.make_train_step = lambda program, replay=False: shared(
        program, ("train", replay), lambda: make_train_step(program, replay)
    )
    module.make_eval_step = lambda program: shared(program, "eval", lambda: make_eval_step(program))
