"""Training program: mesh, optimizer, initialization and steps of one experiment, built once.

`pretrain`, `plan` and `bench` run the same steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxlm.config.experiment import Experiment, OptimizerConfig, Phase, TrainConfig
from jaxlm.errors import UserError
from jaxlm.fields import with_value
from jaxlm.keys import Purpose, purpose_key
from jaxlm.objectives.base import Batch, Bound, Constants, Example, Memory, Objective, Term, Terms
from jaxlm.parallel.activations import tracing_for
from jaxlm.parallel.checksums import checksum
from jaxlm.parallel.compiler import compiler_options
from jaxlm.parallel.mesh import check_batch
from jaxlm.parallel.rules import batch_sharding, is_stacked, place, replicated, shardings
from jaxlm.training.microbatches import gradients, sum_over_microbatches
from jaxlm.training.optimizers import make_optimizer, make_schedule, muon_labels, with_state_of
from jaxlm.trees import leaves, matches_patterns, path_string, subtrees
from jaxlm.types import Params


class TrainState(NamedTuple):
    """What a step updates and a checkpoint holds."""

    step: jax.Array
    """Number of updates done, int32 scalar."""
    params: Params
    opt_state: Any
    memory: Memory = ()
    """Recurrence memory that a model carries from batch to batch of a stream; () for stateless models."""
    average: Params | tuple[()] = ()
    """Moving average of the parameters (see `OptimizerConfig.average`); () without one."""

    @property
    def eval_params(self) -> Params:
        """The parameters that evaluation and later commands read."""
        return self.average or self.params


class Update(NamedTuple):
    """What is known of a program before anything is compiled, and can be checked of an objective that is not bound."""

    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    frozen_params: tuple[str, ...]
    unused_params: tuple[str, ...]
    """Paths of the parameters of the run that a phase does not have."""
    new_state: Callable[[Params], TrainState]
    """Returns the state of step 0."""
    shapes: TrainState


def make_update(
    objective: Objective, train: TrainConfig, optimizer: OptimizerConfig, mesh: Mesh,
    phase: Phase | None = None, of_run: TrainState | None = None,
) -> Update:
    """Return the optimizer of an objective and the shapes of its state; see `Program`.

    The state of a `phase` is that of its run, whose shapes are `of_run`.
    """
    check_batch(train.batch_size, train.accumulate, mesh, objective.row_group)
    after, steps = phase.schedule_span() if phase else (0, train.steps)
    config, model = optimizer.with_warmup(steps), objective.model
    frozen_params = (*objective.frozen_params, *config.freeze)
    optimizer = make_optimizer(config, steps, model.input_params, frozen_params, model.decay_above_layers, after)

    def new_state(params: Params) -> TrainState:
        memory = objective.initial_memory(train.batch_size)
        state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), memory)
        return state._replace(average=params) if config.average else state

    params = jax.eval_shape(objective.init, jax.random.key(0))
    unused = _unused_params(phase, params, of_run.params) if phase else ()
    shapes: TrainState = jax.eval_shape(new_state, of_run.params if phase else params)
    _check_patterns(config.freeze, shapes.params)
    if config.layer_decay != 1.0 and not any(map(is_stacked, leaves(params))):
        raise UserError("optimizer.layer_decay needs layers in a stack, which this model lacks; set it to 1.")
    trained = {path: kind for path, kind in leaves(muon_labels(shapes.params)).items()
               if not matches_patterns(path, frozen_params)}
    if config.name == "muon" and "muon" not in trained.values():
        raise UserError(
            f"optimizer.name muon is for the kernels of stacked layers, of which {type(model).__name__} trains none; "
            "choose adamw, or another one."
        )
    if phase:
        _require_same_state(phase, shapes, of_run)
        optimizer, shapes = with_state_of(optimizer, shapes.opt_state, of_run.opt_state), of_run
    return Update(optimizer, make_schedule(config, steps, after), frozen_params, unused, new_state, shapes)


def _unused_params(phase: Phase, params: Params, of_run: Params) -> tuple[str, ...]:
    """Return the paths of the run's parameters that a phase does not have; raise UserError for others that it has."""
    ours, theirs = ({path: leaf.shape for path, leaf in leaves(tree).items()} for tree in (params, of_run))
    if different := {path for path, shape in ours.items() if theirs.get(path) != shape}:
        raise UserError(f"{', '.join(phase.changes)} would change the parameters {', '.join(subtrees(different, ours))}"
                        ", which a phase cannot; begin another run with --init-from.")
    return tuple(path for path in theirs if path not in ours)


def check_program(experiment: Experiment, mesh: Mesh) -> None:
    """Raise the UserErrors of the run's `Program` and of its phases, before hours of preparing text.

    Nothing is compiled, and the number of steps may still depend on the text.
    """
    if experiment.train.steps is None:
        experiment = with_value(experiment, "train.steps", experiment.phases[-1].after + 1)

    def shapes(e: Experiment, *of_phase: Any) -> TrainState:
        return make_update(e.objective, e.train, e.optimizer, mesh, *of_phase).shapes

    of_run = shapes(experiment)
    for phase in experiment.phases:
        with phase.named():
            if phase.changes:
                shapes(phase.experiment, phase, of_run)


def _require_same_state(phase: Phase, shapes: TrainState, of_run: TrainState) -> None:
    """Raise UserError if a phase changes the arrays of the run's state, by their names without places in a chain."""
    ours, theirs = ([
        (*(key for key in path if not isinstance(key, jax.tree_util.SequenceKey)), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    ] for state in (shapes, of_run))
    if ours != theirs:
        raise UserError(f"{', '.join(phase.changes)} would change the parameters, what the optimizer stores of them "
                        "or the recurrence memory, which a phase cannot; begin another run with --init-from.")


class Program:
    """Steps of an experiment on a mesh. `shapes` and `shardings` are those of the TrainState."""

    def __init__(
        self, objective: Bound, train: TrainConfig, optimizer: OptimizerConfig, mesh: Mesh,
        phases: Sequence[Phase] = (), phase: Phase | None = None, run: Program | None = None,
    ) -> None:
        """Build the jitted steps.

        Args:
            objective: The objective. Its constants are arrays on the host, or shapes.
            train: Batch size, seed and number of steps.
            optimizer: The optimizer and its schedule.
            mesh: Devices.
            phases: Phases of the run, whose programs `at` returns.
            phase: The phase that it is the program of; None for that of the whole run.
            run: For a phase, the program of its run: the same state and constants and, but for the model or an
                objective of its own, the same evaluation.

        Raises:
            UserError: The batch does not divide over the mesh, a pattern of `optimizer.freeze` matches nothing, or muon
                finds no matrices.
        """
        if train.replay_every:
            train = dataclasses.replace(train, deterministic=True)
        self.objective, self.mesh, self.train, self._phases = objective, mesh, train, phases
        self._programs: dict[int, Program] = {}
        self._counts_flops = not optimizer.freeze  # a step may leave out the backward pass of frozen layers
        of_phase = (phase, run.shapes) if phase else ()
        update = make_update(objective, train, optimizer, mesh, *of_phase)
        self.optimizer, self.schedule, self.frozen_params, self.unused_params, self._new_state, self.shapes = update
        self.average = optimizer.average
        rows_sharded = jax.tree.map(lambda _: batch_sharding(mesh), self.shapes.memory)
        own = objective.model.sharding_rules
        self.shardings: TrainState = shardings(self.shapes, mesh, own)._replace(memory=rows_sharded)
        constants = objective.constants
        self.constants = run.constants if run else place(constants, shardings(constants, mesh))
        self.compiler_options = compiler_options(mesh, train.deterministic)
        self.train_step, self.replay_step = make_train_step(self), make_train_step(self, replay=True)
        has_own = phase is None or "objective" in phase.changes
        self.eval_objective = objective if has_own else dataclasses.replace(run.objective, model=objective.model)
        parts = (run or self).train.accumulate  # of the run, as its batches of held-out rows
        self.eval_microbatches = parts if self.eval_objective.is_separable else 1
        is_evaluated_alike = not has_own and run.objective.model == objective.model
        self.eval_step = run.eval_step if is_evaluated_alike else make_eval_step(self)

    def at(self, step: int) -> Program:
        """Return the program of a step, counted from 1, on the same state; each phase's is built at its first step.

        It evaluates what this program does, with the model of its phase, or the phase's own objective.

        Raises:
            UserError: The phase's batch does not divide over the mesh, or it changes the shapes of the state.
        """
        phase = next((p for p in self._phases if p.last is None or step <= p.last), None)
        if phase and phase.changes and phase.number not in self._programs:
            with phase.named():
                self._programs[phase.number] = self._of_phase(phase)
        return self._programs.get(phase.number, self) if phase else self

    def _of_phase(self, phase: Phase) -> Program:
        e = phase.experiment
        check_batch(e.train.batch_size, e.train.accumulate, self.mesh, e.objective.row_group)
        if not phase.sets("objective", "optimizer.", "train.accumulate"):
            return self  # jit compiles its step for every shape
        return Program(e.objective, e.train, e.optimizer, self.mesh, (), phase, self)

    def init_params(self, seed: int) -> Params:
        """Return fresh parameters. Each is created on its own devices, so that no device holds all of them."""
        key = purpose_key(seed, Purpose.INITIALIZATION)
        init = jax.jit(self.objective.init, out_shardings=self.shardings.params, compiler_options=self.compiler_options)
        return init(key)

    def init_state(self, params: Params) -> TrainState:
        """Return the state of step 0 with these parameters.

        They are copied, since a step reuses the memory of its state and a student may begin with its teacher's arrays.
        """
        params = place(params, self.shardings.params)
        return jax.jit(self._new_state, out_shardings=self.shardings)(params)

    def initial_memory(self) -> Memory:
        """Return the initial recurrence memory of a stream, on its devices."""
        return jax.jit(
            lambda: self.objective.initial_memory(self.train.batch_size), out_shardings=self.shardings.memory
        )()

    @property
    def num_params(self) -> int:
        """Number of parameters."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.shapes.params))

    @property
    def size(self) -> str:
        """Parameter count as text, with the count of frozen parameters if there are any."""
        leaves = jax.tree_util.tree_leaves_with_path(self.shapes.params)
        frozen = [leaf for path, leaf in leaves if matches_patterns(path_string(path), self.frozen_params)]
        count = sum(math.prod(leaf.shape) for leaf in frozen)
        return f"{self.num_params:,} parameters" + (f" ({count:,} of them frozen)" if count else "")

    def step_flops(self, length: int, rows: int) -> float:
        """Return the FLOPs of a training step, 0 if not counted; see `Objective.step_flops`."""
        return self._counts_flops * self.objective.step_flops(length, rows)

    def lower(self, batch: Batch) -> Any:
        """Return the train step lowered for a batch of shapes, without any arrays."""
        return self.train_step.lower(self.shapes, batch, self.constants)


def _check_patterns(patterns: Sequence[str], params: Params) -> None:
    """Raise UserError unless each pattern of `optimizer.freeze` matches a parameter, and some are trained."""
    names = list(leaves(params))
    for pattern in patterns:
        if not any(matches_patterns(name, [pattern.removeprefix("!")]) for name in names):
            raise UserError(
                f"optimizer.freeze: the pattern {pattern!r} matches no parameter; those of this run begin with "
                f"{', '.join(params)}."
            )
    if patterns and all(matches_patterns(name, patterns) for name in names):
        raise UserError("optimizer.freeze leaves no parameter to train; take some out, such as '!classifier'.")


def corruption_key(seed: int, step: jax.Array | int) -> jax.Array:
    """Return the key of a step's corruption: threefry, so that masks are the same on every mesh and device."""
    return jax.random.fold_in(purpose_key(seed, Purpose.CORRUPTION), step)


def dropout_key(seed: int, step: jax.Array | int) -> jax.Array:
    """Return the dropout key of a step; its masks are the same on every mesh and device (see `dropout`)."""
    return jax.random.fold_in(purpose_key(seed, Purpose.DROPOUT), step)


def make_train_step(
    program: Program, replay: bool = False
) -> Callable[[TrainState, Batch, Constants], tuple[TrainState, Terms]]:
    """Return the jitted step: corrupt, forward, backward, update. The new state reuses the old state's buffers.

    With `replay` it computes loss and gradients twice, and its terms include "replay": how many arrays differ.
    """
    optimizer, mesh, t = program.optimizer, program.mesh, program.train

    def train_step(state: TrainState, batch: Batch, constants: Constants) -> tuple[TrainState, Terms]:
        objective = program.objective.with_constants(constants)
        with tracing_for(mesh, program.compiler_options):
            example = objective.corrupt(corruption_key(t.seed, state.step), batch)
            key = dropout_key(t.seed, state.step)

            def results(params: Params, example: Example, key: jax.Array) -> tuple[Params, Terms, Memory]:
                groups = len(jax.tree.leaves(batch)[0]) // objective.row_group
                memory, frozen = state.memory, program.frozen_params
                grads, *rest = gradients(objective, params, example, memory, key, t.accumulate, frozen, groups)
                if replay:  # else only those that reach the optimizer are summed into shards, in another order
                    grads = jax.lax.with_sharding_constraint(grads, program.shardings.params)
                return grads, *rest

            grads, terms, memory = results(state.params, example, key)
            if replay:  # behind barriers, since what uses a result may change how the compiler fuses its sums
                grads, terms, memory = jax.lax.optimization_barrier((grads, terms, memory))
                first = _digests(grads, terms, memory)
                again = results(*_opaque_copies(state.params, example, key, jnp.min(first), state.step))
                second = _digests(*jax.lax.optimization_barrier(again))
                terms |= {"replay": Term.of(first != second, jnp.ones(first.shape))}
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        real = objective.real_tokens(example, batch)
        terms |= {
            "grad_norm": Term(optax.tree.norm(grads), jnp.ones(())),
            "real_tokens": Term.of(real, jnp.ones(real.shape)),
        }
        params, opt_state = keep_unused((params, opt_state), (state.params, state.opt_state), program.unused_params)
        average = ()
        if program.average:
            decay = jnp.minimum(program.average, (1 + state.step) / (10 + state.step))
            average = optax.incremental_update(params, state.average, 1 - decay)
        new = TrainState(state.step + 1, params, opt_state, memory, average)
        if t.skip_nonfinite:
            new = _if_finite(new, state, terms, objective.initial_memory(t.batch_size))
        return new, terms

    return jax.jit(
        train_step,
        in_shardings=(program.shardings, batch_sharding(mesh), shardings(program.constants, mesh)),
        out_shardings=(program.shardings, replicated(mesh)),
        donate_argnums=0,
        compiler_options=program.compiler_options,
    )


def _if_finite(new: TrainState, old: TrainState, terms: Terms, fresh_memory: Memory) -> TrainState:
    """Return `new` if loss and gradients are finite, else `old` after a skipped step.

    Its memory is the new one if that is finite, else fresh. The learning rate goes on, since phases and decays begin
    after so many steps. The host counts the steps that are skipped in a row (see `StepLog`): optax.apply_if_finite has
    its counts in the optimizer's state, so that no run could be resumed with another limit.
    """
    finite = jnp.isfinite(terms["loss"].total) & jnp.isfinite(terms["grad_norm"].total)
    is_whole = jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(new.memory)]))
    memory = jax.tree.map(lambda leaf, fresh: jnp.where(is_whole, leaf, fresh), new.memory, fresh_memory)
    opt_state = jax.tree.map(lambda new, old: new if _is_rate(new) else old, new.opt_state, old.opt_state,
                             is_leaf=_is_rate)
    kept = old._replace(step=new.step, opt_state=opt_state, memory=memory)
    return jax.tree.map(lambda updated, kept: jnp.where(finite, updated, kept), new, kept)


def _is_rate(state: Any) -> bool:
    return isinstance(state, optax.ScaleByScheduleState)


def keep_unused(new: tuple[Params, Any], old: tuple[Params, Any], unused_params: Sequence[str]) -> tuple[Params, Any]:
    """Return parameters and optimizer state with what belongs to unused parameters as it was."""
    every = set(leaves(new[0]))

    def keep(path: Any, new: jax.Array, old: jax.Array) -> jax.Array:
        name = path_string(path)  # ends with that of a parameter, of which another one may be an end
        owners = [name[at + 1 :] for at, char in enumerate(name) if char == "/" and name[at + 1 :] in every]
        return old if owners and owners[0] in unused_params else new

    return jax.tree_util.tree_map_with_path(keep, new, old) if unused_params else new


def _digests(grads: Params, terms: Terms, memory: Memory) -> jax.Array:
    """Return the checksums of all results of a loss and its backward pass."""
    return jnp.stack([checksum(leaf) for leaf in jax.tree.leaves((grads, terms["loss"].total, memory))])


def _opaque_copies(
    params: Params, example: Example, key: jax.Array, digest: jax.Array, step: jax.Array
) -> tuple[Params, Example, jax.Array]:
    """Return the step's inputs so that the compiler cannot reuse the first computation, which `digest` is of.

    A barrier alone does not keep the CPU's compiler from merging the two forward passes: it removes barriers before
    it looks for equal operations. It cannot know of `zero` that no step is below 0.
    """
    zero = jnp.minimum(digest, (step < 0).astype(jnp.uint32))

    def same(x: jax.Array) -> jax.Array:
        return x if jnp.issubdtype(x.dtype, jnp.floating) else x ^ zero.astype(x.dtype)

    params, _ = jax.lax.optimization_barrier((params, zero))
    return params, jax.tree.map(same, example), jax.random.wrap_key_data(
        same(jax.random.key_data(key)), impl=jax.random.key_impl(key)
    )


def make_eval_step(program: Program) -> Callable[[Params, Batch, jax.Array, Constants, Memory], tuple[Terms, Memory]]:
    """Return the jitted evaluation step, without dropout.

    Its arguments are params, batch, index of the batch, constants and memory; it returns terms and memory. A batch has
    the same corruption in each evaluation, so that losses of different steps and seeds can be compared. It is evaluated
    in as many microbatches as a step of the run has.
    """
    mesh, count = program.mesh, program.eval_microbatches

    def eval_step(
        params: Params, batch: Batch, index: jax.Array, constants: Constants, memory: Memory
    ) -> tuple[Terms, Memory]:
        objective = program.eval_objective.with_constants(constants)
        key = jax.random.fold_in(purpose_key(0, Purpose.EVALUATION), index)
        key_corrupt, key_loss = jax.random.split(key)
        with tracing_for(mesh, program.compiler_options):
            example = objective.corrupt(key_corrupt, batch)

            def part(example: Example, memory: Memory, index: jax.Array | int) -> tuple[Terms, Memory]:
                return objective.stream_loss(params, example, memory, key_loss, False)

            if count == 1:
                return part(example, memory, 0)
            groups = len(jax.tree.leaves(batch)[0]) // objective.row_group
            terms, memory = sum_over_microbatches(part, objective.shared_arrays, example, memory, count, groups)
        return {name: term._replace(coefficient=term.coefficient / count) for name, term in terms.items()}, memory

    return jax.jit(
        eval_step,
        in_shardings=(
            program.shardings.params, batch_sharding(mesh), None, shardings(program.constants, mesh),
            program.shardings.memory,
        ),
        out_shardings=(replicated(mesh), program.shardings.memory),
        compiler_options=program.compiler_options,
    )
