"""Optimizers and learning-rate schedules, put together from optax."""

from __future__ import annotations

from typing import Any

import jax
import optax

from jaxlm.config.experiment import OptimizerConfig
from jaxlm.parallel.rules import path_string


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate as a function of the 0-based step.

    linear, cosine, constant: 0 at step 0, the peak after warmup_steps, then the decay to final_share · peak at `steps`.
    (BERT's and ELECTRA's own code counts the linear decay from step 0, which is lower by warmup / steps: 1 to 2.6 %.)
    inverse-sqrt: peak · sqrt(warmup / max(step, warmup)), T5's rule (Raffel et al. 2020, section 3.1.2), which holds
    the peak during the warm-up.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    final = peak * config.final_share
    if config.schedule == "inverse-sqrt":
        hold = max(warmup, 1)
        return lambda step: peak * (hold / jax.numpy.maximum(step, hold)) ** 0.5
    decay_steps = max(steps - warmup, 1)
    after = {
        "linear": lambda: optax.linear_schedule(peak, final, decay_steps),
        "cosine": lambda: optax.cosine_decay_schedule(peak, decay_steps, config.final_share),
        "constant": lambda: optax.constant_schedule(peak),
    }[config.schedule]()
    if warmup == 0:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clipping by the global norm, then the update.

    adamw: Loshchilov & Hutter 2019, decay on kernels and embeddings only, as BERT excludes biases and norms.
    lamb: You et al. 2020, algorithm 2; the trust ratio is taken layer by layer, and biases and norms go without it.
    Both as `bias_correction` says.
    adafactor: Shazeer & Stern 2018 as T5 uses it: factored second moments with decay 1 - step^-0.8, updates clipped to
    RMS 1 and scaled by the RMS of the parameter; no momentum, no weight decay.
    """
    schedule = make_schedule(config, steps)
    if config.name == "adafactor":
        rule = per_layer(
            optax.chain(
                optax.scale_by_factored_rms(decay_rate=0.8),
                optax.clip_by_block_rms(1.0),
                optax.scale_by_param_block_rms(),
            )
        )
    else:
        rule = optax.scale_by_adam(config.b1, config.b2, config.eps)
        if not config.bias_correction:
            rule = uncorrected(rule, config.eps)
        if config.weight_decay:
            rule = optax.chain(rule, optax.add_decayed_weights(config.weight_decay, mask=matrices))
        if config.name == "lamb":
            rule = optax.chain(rule, optax.masked(per_layer(optax.scale_by_trust_ratio()), matrices))
    clip = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    return optax.chain(*clip, rule, optax.scale_by_learning_rate(schedule))


def uncorrected(adam: optax.GradientTransformation, eps: float) -> optax.GradientTransformation:
    """Adam's update from the moments as they are, m / (√v + eps), as BERT's and ELECTRA's authors have it."""
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        _, state = adam.update(updates, state, params)
        return jax.tree.map(lambda m, v: m / (jax.numpy.sqrt(v) + eps), state.mu, state.nu), state

    return optax.GradientTransformation(adam.init, update)


def matrices(params: Any) -> Any:
    """True for kernels and embeddings, False for biases and norm scales: a tree like `params`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path_string(path).rsplit("/", 1)[-1] in ("kernel", "embedding"), params
    )


def per_layer(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies `rule` to each layer of a scanned stack on its own, as if the layers were separate parameters."""
    def init(params: Any) -> Any:
        return jax.vmap(rule.init)(params) if jax.tree.leaves(params) else rule.init(params)

    def update(updates: Any, state: Any, params: Any) -> Any:
        return (jax.vmap(rule.update) if jax.tree.leaves(updates) else rule.update)(updates, state, params)

    def labels(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "stacked" if "/layers/" in f"/{path_string(path)}" else "single", params
        )

    return optax.partition({"stacked": optax.GradientTransformation(init, update), "single": rule}, labels)
