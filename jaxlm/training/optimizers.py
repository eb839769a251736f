"""Optimizers and learning-rate schedules, put together from optax."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxlm.config.experiment import OptimizerConfig
from jaxlm.errors import UserError
from jaxlm.parallel.rules import is_stacked
from jaxlm.trees import matches_patterns, path_string

DECAYED = ("kernel", "embedding", "query_start", "segment", "content_bias", "position_bias", "segment_bias")
"""Names of the parameters with weight decay: matrices, and the vectors that XLNet's own code decays too."""


def make_schedule(config: OptimizerConfig, steps: int, after: int = 0) -> optax.Schedule:
    """Return the learning rate as a function of the 0-based step; the schedule has `steps`, and begins after `after`.

    The linear, cosine, wsd and constant schedules rise from 0 to the peak over `warmup_steps`; linear and cosine then
    decay to final_share · peak at `steps`. (BERT's and ELECTRA's own code counts the linear decay from step 0, which is
    lower by warmup / steps: 1 to 2.6 %.) wsd holds the peak until the last decay_share · steps, which decay as
    `decay_shape` says (Hägele et al. 2024, section 3). inverse-sqrt is peak · sqrt(warmup / max(step, warmup)), T5's
    schedule (Raffel et al. 2019, section 3.1.2), which holds the peak during the warm-up.
    """
    if after:
        own = make_schedule(config, steps)
        return lambda step: own(jnp.maximum(step - after, 0))
    peak, warmup = config.learning_rate, config.warmup_steps
    final = peak * config.final_share
    is_wsd = config.schedule == "wsd"
    start = max(config.stable_steps(steps), warmup) if is_wsd else warmup
    decay_steps = max(steps - start, 1)
    own_rates = config.own_schedule(decay_steps)
    if config.schedule == "inverse-sqrt" and own_rates is None:
        hold = max(warmup, 1)
        return lambda step: peak * (hold / jnp.maximum(step, hold)) ** 0.5
    shape = config.decay_shape if is_wsd else config.schedule
    shapes = {
        "linear": lambda: optax.linear_schedule(peak, final, decay_steps),
        "cosine": lambda: optax.cosine_decay_schedule(peak, decay_steps, config.final_share),
        "1-sqrt": lambda: lambda step: peak - (peak - final) * jnp.sqrt(jnp.clip(step / decay_steps, 0.0, 1.0)),
        "constant": lambda: optax.constant_schedule(peak),
    }
    if own_rates is not None:
        after = lambda step: own_rates(jnp.maximum(step, 0))  # noqa: E731 - it is called in the warm-up, too
    elif shape not in shapes:
        raise _unknown("schedule", shape, "own_schedule")
    else:
        after = shapes[shape]()
    if start > warmup:
        after = optax.join_schedules([optax.constant_schedule(peak), after], [start - warmup])
    if warmup == 0:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def _unknown(field: str, value: str, method: str) -> UserError:
    return UserError(f"optimizer.{field} {value!r} is not one of jaxlm's; its class must override {method}.")


def make_optimizer(
    config: OptimizerConfig, steps: int, input_params: Collection[str] = (), frozen_params: Sequence[str] = (),
    decay_above_layers: int = 2, after: int = 0,
) -> optax.GradientTransformation:
    """Return clipping by the global norm, then the update.

    adamw: Loshchilov & Hutter 2019, with decay on `DECAYED` only, as BERT excludes biases and norms.
    stable-adamw: adamw with update clipping (Wortsman et al. 2023, section 3.5); see `with_update_clipping`.
    lion: Chen et al. 2023, algorithm 2, with the same decay; its own rates are b1 0.9 and b2 0.99.
    muon: Jordan et al. 2024 for the kernels of layers, and adamw for everything else (see `scale_by_muon`).
    lamb: You et al. 2020, algorithm 2; biases and norms go without the trust ratio.
    adafactor: Shazeer & Stern 2018 as T5 uses it: factored second moments with decay 1 - step^-0.8, updates clipped to
    RMS 1 and scaled by the RMS of the parameter; no momentum, no weight decay.
    adagrad: Duchi et al. 2011, with sums of squares that begin at `eps`; no weight decay.
    A subclass may have another one (`OptimizerConfig.own_update`), with the same decay as adamw.

    Layer decay counts `input_params` as below the first layer, and begins at the last one with the power
    `decay_above_layers`. Parameters that match `frozen_params` get no updates (see `matches_patterns`); `after` steps
    come before the schedule.
    """
    own = config.own_update()
    name = config.name if own is None else "own"
    if name == "adagrad":
        update = optax.scale_by_rss(initial_accumulator_value=0.0, eps=config.eps)
    elif name == "adafactor":
        update = optax.chain(
            optax.scale_by_factored_rms(decay_rate=0.8),
            per_layer(optax.clip_by_block_rms(1.0)),
            per_layer(scale_by_parameter_rms()),
        )
    else:
        adam = optax.scale_by_adam(config.b1, config.b2, config.eps)
        adam = adam if config.bias_correction else without_bias_correction(adam, config.eps)
        updates = dict.fromkeys(("adamw", "stable-adamw", "lamb"), adam) | {
            "lion": optax.scale_by_lion(config.b1, config.b2),
            "muon": optax.partition({"muon": scale_by_muon(), "adam": adam}, muon_labels), "own": own,
        }
        if (update := updates.get(name)) is None:
            raise _unknown("name", name, "own_update")
        if config.weight_decay:
            update = optax.chain(update, optax.add_decayed_weights(config.weight_decay, mask=weight_decay_mask))
        if name == "stable-adamw":
            update = with_update_clipping(update, config)
        if name == "lamb":
            update = optax.chain(update, optax.masked(per_layer(optax.scale_by_trust_ratio()), weight_decay_mask))
    clip = [clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    depth = [scale_by_depth(config.layer_decay, input_params, decay_above_layers)] if config.layer_decay != 1.0 else []
    rate = optax.scale_by_learning_rate(make_schedule(config, steps, after))
    if not frozen_params:
        return optax.chain(*clip, optax.chain(update, *depth) if depth else update, rate)
    parts = {"trained": optax.chain(*clip, update, rate), "frozen": optax.set_to_zero()}
    partition = optax.partition(parts, lambda params: jax.tree_util.tree_map_with_path(
        lambda path, _: "frozen" if matches_patterns(path_string(path), frozen_params) else "trained", params
    ))
    return optax.chain(partition, *depth) if depth else partition  # the depth is that of all layers, frozen ones too


def with_state_of(optimizer: optax.GradientTransformation, own: Any, other: Any) -> optax.GradientTransformation:
    """Return an optimizer on the state of another one: the same arrays, in a chain with other links that store none."""
    own, other = map(jax.tree.structure, (own, other))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates, state = optimizer.update(updates, own.unflatten(jax.tree.leaves(state)), params)
        return updates, other.unflatten(jax.tree.leaves(state))

    return optax.GradientTransformation(optimizer.init, update)


def clip_by_global_norm(limit: float) -> optax.GradientTransformation:
    """Multiply all updates by limit / max(their joint norm, limit) (Pascanu et al. 2013, algorithm 1).

    One factor fuses with the update that follows; optax.clip_by_global_norm selects between two arrays for each.
    AdamW's update of 8 million parameters takes 27 ms of CPU time with this function, and 42 ms with optax's.
    """
    def clip(updates: Any, params: Any) -> Any:
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(u)) for u in jax.tree.leaves(updates)))
        factor = limit / jnp.maximum(norm, limit)
        return jax.tree.map(lambda u: u * factor.astype(u.dtype), updates)

    return optax.stateless(clip)


def per_layer(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply a stateless transformation of single parameters to each layer of a stack by itself."""
    def update_layer(update: jax.Array, param: jax.Array) -> jax.Array:
        return transform.update(update, optax.EmptyState(), param)[0]

    def update(path: tuple[Any, ...], update: jax.Array, param: jax.Array) -> jax.Array:
        return (jax.vmap(update_layer) if is_stacked(path_string(path)) else update_layer)(update, param)

    return optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(update, updates, params))


def scale_by_parameter_rms() -> optax.GradientTransformation:
    """Multiply each update by max(RMS of its parameter, 1e-3) (Shazeer & Stern 2018, section 8).

    optax.scale_by_param_block_rms computes the RMS twice, for a gradient at zero: 3 of the 22 ms of T5-1.1-base's step
    on a v5e by the compiler's estimate.
    """
    def scale(update: jax.Array, param: jax.Array) -> jax.Array:
        return update * jnp.maximum(jnp.sqrt(jnp.mean(jnp.square(param))), 1e-3)

    return optax.stateless(lambda updates, params: jax.tree.map(scale, updates, params))


def scale_by_depth(
    decay: float, input_params: Collection[str], above_layers: int = 2
) -> optax.GradientTransformation:
    """Multiply each update by decay^(number of layers above its parameter), as in the fine-tuning of ELECTRA and XLNet.

    Layer i of n has depth i + 1; a stack of repeats of p kinds of layers (the Reformer's) has layer k of repeat i at
    i · p + k. The parameters named in `input_params` have depth 0, and all others, such as heads,
    n + `above_layers`. A stack with fewer layers than the deepest one (ERNIE's entities) belongs to the last layers.
    """
    def factors(params: Any) -> Any:
        names = {path_string(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
        period = 1 + max(map(_kind, names), default=0)
        num_layers = period * max((leaf.shape[0] for name, leaf in names.items() if is_stacked(name)), default=0)
        top = num_layers + above_layers

        def factor(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array | float:
            name = path_string(path)
            if is_stacked(name):
                first = 1 + num_layers - period * leaf.shape[0] + _kind(name)
                depths = jnp.arange(first, num_layers + 1, period, dtype=jnp.float32)
                return (decay ** (top - depths)).reshape(-1, *[1] * (leaf.ndim - 1))
            stack, is_first, _ = name.partition("/first/")  # of ERNIE's entities, whose layer has another form
            others = [leaf.shape[0] for other, leaf in names.items() if other.startswith(f"{stack}/layers/")]
            if is_first and others:
                return decay ** (top - num_layers + max(others))
            parts = name.split("/")[:2]  # the first may be a network of ELECTRA
            return decay**top if set(parts) & set(input_params) else 1.0

        return jax.tree_util.tree_map_with_path(factor, params)

    return optax.stateless(lambda updates, params: jax.tree.map(lambda u, f: u * f, updates, factors(params)))


def _kind(name: str) -> int:
    """Return the number of a parameter's layer in a repeat ("layers/2/mlp/wi/kernel"), 0 in a stack of equal layers."""
    found = re.search(r"(?:^|/)layers/(\d+)/", name)
    return int(found[1]) if found else 0


def without_bias_correction(adam: optax.GradientTransformation, eps: float) -> optax.GradientTransformation:
    """Return Adam's update m / (√v + eps) from the uncorrected moments, as in BERT's and ELECTRA's own code."""
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        _, state = adam.update(updates, state, params)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), state.mu, state.nu), state

    return optax.GradientTransformation(adam.init, update)


def scale_by_muon() -> optax.GradientTransformation:
    """Orthogonalize the momentum of matrices, the last two axes of each parameter (Jordan et al. 2024).

    The momentum is Nesterov's, with decay 0.95, and 5 Newton-Schulz steps follow. The factor 0.2 · sqrt(max(inputs,
    outputs)) gives the update AdamW's size, so that one learning rate and weight decay serve both (Liu et al. 2025,
    section 2.2). optax corrects the bias of both terms of Nesterov's momentum, each by its own power of the decay;
    Jordan's code and torch.optim.Muon correct none. The updates soon agree: their cosine is 0.986 at step 2 and 1.0 at
    step 60.
    """
    def axes(params: Any) -> Any:
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), params)

    def scale(update: jax.Array) -> jax.Array:
        return update * (0.2 * math.sqrt(max(update.shape[-2:])))

    muon = optax.contrib.scale_by_muon(weight_dimension_numbers=axes)
    return optax.chain(muon, optax.stateless(lambda updates, _: jax.tree.map(scale, updates)))


def muon_labels(params: Any) -> Any:
    """Return a tree like `params`: "muon" for the kernels of stacked layers, "adam" for the others."""
    def label(path: tuple[Any, ...], _: Any) -> str:
        name = path_string(path)
        return "muon" if is_stacked(name) and name.endswith("/kernel") else "adam"

    return jax.tree_util.tree_map_with_path(label, params)


def with_update_clipping(adamw: optax.GradientTransformation, config: OptimizerConfig) -> optax.GradientTransformation:
    """Divide AdamW's update, decay included, by max(1, RMS of g / √v) of each parameter (Wortsman et al. 2023).

    v is the second moment after this step, at least eps². Layers of a stack, query, key and value, and the two inputs
    of a gated feed-forward are parameters by themselves; the published ModernBERT joined the latter ones.
    """
    def update(grads: Any, state: Any, params: Any = None) -> Any:
        updates, state = adamw.update(grads, state, params)
        count, nu = optax.tree.get(state, "count"), optax.tree.get(state, "nu")
        correction = 1 - config.b2**count if config.bias_correction else 1.0

        def clip(path: tuple[Any, ...], update: jax.Array, grad: jax.Array, v: jax.Array) -> jax.Array:
            ratio = jnp.square(grad) / jnp.maximum(v / correction, config.eps**2)
            axes = tuple(range(is_stacked(path_string(path)), grad.ndim))
            return update / jnp.maximum(1.0, jnp.sqrt(jnp.mean(ratio, axes, keepdims=True)))

        return jax.tree_util.tree_map_with_path(clip, updates, grads, nu), state

    return optax.GradientTransformation(adamw.init, update)


def weight_decay_mask(params: Any) -> Any:
    """Return a tree like `params`: True for the names in DECAYED, False for biases and norm scales."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path_string(path).rsplit("/", 1)[-1] in DECAYED, params)
