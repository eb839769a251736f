"""Optimizers against a slow reference in numpy, or torch's; schedules at their corners."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from jaxlm.config.experiment import OptimizerConfig, TrainConfig
from jaxlm.errors import UserError
from jaxlm.huggingface import xlnet
from jaxlm.models.albert import Albert
from jaxlm.models.bert import Bert
from jaxlm.models.deberta import Deberta
from jaxlm.models.elmo import Elmo
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.layers.stack import unstack
from jaxlm.models.modernbert import ModernBert
from jaxlm.models.reformer import Reformer
from jaxlm.models.t5 import T5
from jaxlm.models.xlnet import Xlnet
from jaxlm.objectives.bidirectional_lm import BidirectionalLM
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.permutation_lm import PermutationLM
from jaxlm.parallel.mesh import MeshConfig, make_mesh
from jaxlm.parallel.rules import is_stacked
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training.optimizers import make_optimizer, make_schedule, muon_labels, weight_decay_mask
from jaxlm.training.program import Program
from jaxlm.trees import get, leaves

STEPS = 6


def parameters(seed: int = 0) -> dict:
    """Two layers, an embedding and a norm, under the names that models use."""
    draw = np.random.default_rng(seed)

    def normal(*shape):
        return (draw.normal(size=shape) * 0.3).astype(np.float32)

    return {
        "word": {"embedding": normal(7, 4)},
        "encoder": {"layers": {
            layer: {
                "wi": {"kernel": normal(4, 6), "bias": normal(6)}, "norm": {"scale": 1 + normal(4), "bias": normal(4)}
            }
            for layer in ("0", "1")
        }},
        "norm": {"scale": 1 + normal(4)},
    }


def gradients(step: int) -> dict:
    scale = 10.0 ** (step - 3)  # some are clipped, some are not
    return jax.tree.map(lambda g: g * scale, parameters(100 + step))


def stacked(tree: dict) -> dict:
    """The same parameters as models store them: equal layers in one array."""
    layers = tree["encoder"]["layers"]
    return tree | {"encoder": {"layers": jax.tree.map(lambda *leaves: np.stack(leaves), *layers.values())}}


def updating(optimizer: optax.GradientTransformation):
    """Return a compiled step from gradients, state and parameters to the new parameters and state."""

    @jax.jit
    def step(grads, state, params):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def run(
    config: OptimizerConfig, steps: int = STEPS, gradients: Callable[[int], dict] = gradients, frozen: tuple = ()
) -> dict:
    optimizer = make_optimizer(config, steps, ("word",), frozen)
    params = stacked(parameters())
    state, update = jax.jit(optimizer.init)(params), updating(optimizer)
    for step in range(steps):
        params, state = update(stacked(gradients(step)), state, params)
    params = jax.device_get(params)
    layers = {str(i): layer for i, layer in enumerate(unstack(params["encoder"]["layers"]))}
    return params | {"encoder": {"layers": layers}}


def flat(tree: dict) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {"/".join(entry.key for entry in path): np.asarray(leaf, np.float64) for path, leaf in leaves}


def clipped(grads: dict[str, np.ndarray], most: float) -> dict[str, np.ndarray]:
    norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
    return {name: g * min(1.0, most / norm) for name, g in grads.items()}


@dataclasses.dataclass(frozen=True)
class Momentum(OptimizerConfig):
    """An optimizer and a schedule of one's own."""

    name: Literal["momentum"] = "momentum"
    schedule: Literal["halving"] = "halving"

    def own_update(self):
        return optax.trace(self.b1)

    def own_schedule(self, steps):
        return lambda step: self.learning_rate / (1 + step)


def test_an_optimizer_of_ones_own_is_clipped_and_decays():
    config, params = Momentum(learning_rate=0.05, warmup_steps=2, weight_decay=0.1, b1=0.8), flat(parameters())
    momentum = {path: np.zeros_like(p) for path, p in params.items()}
    for step in range(STEPS):
        for path, g in clipped(flat(gradients(step)), config.clip_norm).items():
            momentum[path] = 0.8 * momentum[path] + g
            decay = 0.1 * params[path] if path.endswith(("kernel", "embedding")) else 0.0
            rate = 0.05 * (step / 2 if step < 2 else 1 / (step - 1))
            params[path] = params[path] - rate * (momentum[path] + decay)
    for path, ours in flat(run(config)).items():
        np.testing.assert_allclose(ours, params[path], rtol=2e-5, atol=2e-6, err_msg=path)
    assert make_schedule(config, STEPS)(1) == 0.025  # before its first step it divides by no 0


@pytest.mark.parametrize(("method", "message"), [
    ("own_update", "optimizer.name 'momentum' is not one of jaxlm's; its class must override own_update"),
    ("own_schedule", "optimizer.schedule 'halving' is not one of jaxlm's; its class must override own_schedule"),
])
def test_a_name_without_its_method_is_refused(method, message, monkeypatch):
    monkeypatch.delattr(Momentum, method)
    with pytest.raises(UserError, match=message):
        make_optimizer(Momentum(), STEPS)


@pytest.mark.parametrize(("name", "corrected"), [("lamb", True), ("lamb", False), ("adamw", False)])
def test_updates_written_out(name, corrected):
    """Adam's from the moments, with decay on matrices (without correction: BERT's and ELECTRA's own code); LAMB's is
    scaled one matrix at a time (You et al. 2020, algorithm 2)."""
    config = OptimizerConfig(
        name=name, learning_rate=0.05, warmup_steps=2, weight_decay=0.1, bias_correction=corrected, b1=0.8
    )
    rate = make_schedule(config, STEPS)
    params = flat(parameters())
    m = {path: np.zeros_like(p) for path, p in params.items()}
    v = {path: np.zeros_like(p) for path, p in params.items()}
    for step in range(STEPS):
        for path, g in clipped(flat(gradients(step)), config.clip_norm).items():
            m[path] = 0.8 * m[path] + 0.2 * g
            v[path] = 0.999 * v[path] + 0.001 * g**2
            bias = [1 - b ** (step + 1) if corrected else 1.0 for b in (0.8, 0.999)]
            update = m[path] / bias[0] / (np.sqrt(v[path] / bias[1]) + config.eps)
            if path.endswith(("kernel", "embedding")):
                update = update + config.weight_decay * params[path]
                if name == "lamb":
                    update *= np.linalg.norm(params[path]) / np.linalg.norm(update)
            params[path] = params[path] - float(rate(step)) * update
    for path, ours in flat(run(config)).items():
        np.testing.assert_allclose(ours, params[path], rtol=2e-5, atol=2e-6, err_msg=path)


@pytest.mark.parametrize("corrected", [True, False])
def test_stable_adamw_clips_the_update_of_each_matrix(corrected):
    """Algorithm 2 of Wortsman et al. 2023, written with its corrected decay rates, as in torch-optimi.

    Growing gradients are clipped, a small one in between is not.
    """
    def given(step):
        return jax.tree.map(lambda g: g * np.float32(1e-4 if step == 4 else 1.0), gradients(step))

    config = OptimizerConfig(
        name="stable-adamw", learning_rate=0.05, warmup_steps=2, weight_decay=0.1, b2=0.98, clip_norm=0.0,
        bias_correction=corrected,
    )
    rate = make_schedule(config, STEPS)
    params = flat(parameters())
    m, v = ({path: np.zeros_like(p) for path, p in params.items()} for _ in range(2))
    clipping = []
    for step in range(STEPS):
        b1, b2 = (b * (1 - b**step) / (1 - b ** (step + 1)) if corrected else b for b in (0.9, 0.98))
        for path, g in flat(given(step)).items():
            m[path] = b1 * m[path] + (1 - b1) * g
            v[path] = b2 * v[path] + (1 - b2) * g**2
            rms = np.sqrt(np.mean(g**2 / np.maximum(v[path], config.eps**2)))
            eta = float(rate(step)) / max(1.0, rms)
            decay = config.weight_decay if path.endswith(("kernel", "embedding")) else 0.0
            params[path] = params[path] * (1 - eta * decay) - eta * m[path] / (np.sqrt(v[path]) + config.eps)
            clipping.append(rms)
    assert min(clipping) < 0.5 and max(clipping) > 2
    for path, ours in flat(run(config, gradients=given)).items():
        np.testing.assert_allclose(ours, params[path], rtol=1e-6, atol=1e-6, err_msg=path)


def test_lion_written_out():
    """Chen et al. 2023, algorithm 2; kernels and embeddings decay."""
    config = OptimizerConfig(
        name="lion", learning_rate=0.05, warmup_steps=2, weight_decay=0.1, b1=0.8, b2=0.99, clip_norm=0.0
    )
    rate = make_schedule(config, STEPS)
    params = flat(parameters())
    m = {path: np.zeros_like(p) for path, p in params.items()}
    for step in range(STEPS):
        for path, g in flat(gradients(step)).items():
            update = np.sign(0.8 * m[path] + 0.2 * g)
            m[path] = 0.99 * m[path] + 0.01 * g
            if path.endswith(("kernel", "embedding")):
                update = update + config.weight_decay * params[path]
            params[path] = params[path] - float(rate(step)) * update
    for path, ours in flat(run(config)).items():
        np.testing.assert_allclose(ours, params[path], rtol=1e-6, atol=1e-6, err_msg=path)


def orthogonalized(x: np.ndarray) -> np.ndarray:
    """Five steps of Jordan's Newton-Schulz iteration."""
    x = x / (np.linalg.norm(x) + 1e-8)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


@pytest.mark.parametrize("frozen", [(), ("norm",)])
def test_muon_written_out(frozen):
    """Jordan et al. 2024 with the momentum's bias corrected and the update's size of Liu et al. 2025, for the kernels
    of layers, one layer at a time; the same AdamW as by itself for the others."""
    config = OptimizerConfig(name="muon", learning_rate=0.05, warmup_steps=2, weight_decay=0.1, clip_norm=0.0)
    rate = make_schedule(config, STEPS)
    params = flat(parameters())
    expected = flat(run(dataclasses.replace(config, name="adamw"), frozen=frozen))
    kernels = [path for path in params if path.endswith("kernel")]
    m = {path: np.zeros_like(params[path]) for path in kernels}
    for step in range(STEPS):
        grads = flat(gradients(step))
        for path in kernels:
            m[path] = 0.95 * m[path] + 0.05 * grads[path]
            nesterov = 0.95 * m[path] / (1 - 0.95 ** (step + 2)) + 0.05 * grads[path] / (1 - 0.95 ** (step + 1))
            update = 0.2 * np.sqrt(6) * orthogonalized(nesterov) + config.weight_decay * params[path]
            params[path] = params[path] - float(rate(step)) * update
    assert len(kernels) == 2
    for path, ours in flat(run(config, frozen=frozen)).items():
        target = params if path in kernels else expected
        np.testing.assert_allclose(ours, target[path], rtol=1e-6, atol=1e-6, err_msg=path)


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        (ModernBert(num_layers=4), "attention/{query,key,value,out} mlp/{wi_0,wi_1,wo}"),
        (Xlnet(num_layers=2), "attention/{query,key,value,out,position} mlp/{wi,wo}"),
    ],
)
def test_muon_takes_the_kernels_of_layers(model, kinds):
    names = {f"{part}/{name}" for part, found in re.findall(r"(\w+)/\{(.*?)\}", kinds) for name in found.split(",")}
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    labels = muon_labels(shapes)
    chosen = [path for path in leaves(labels) if get(labels, path) == "muon"]
    assert {"/".join(path.split("/")[-3:-1]) for path in chosen} == names and len(chosen) == len(names)
    assert all(get(shapes, path).ndim == 3 for path in chosen)


def test_muon_is_refused_for_a_model_without_such_kernels():
    """It would be AdamW in silence."""
    model = Elmo(hidden_size=8, cell_size=16, num_highways=1, filter_widths=2)
    objective = BidirectionalLM(model, noise_words=64).bind(Vocabulary.stand_in(300, BidirectionalLM().symbols), 16)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with pytest.raises(UserError, match=r"optimizer.name muon is for .* stacked layers, of which Elmo trains"):
        Program(objective, TrainConfig(steps=1, batch_size=2), OptimizerConfig(name="muon"), mesh)
    bert = MaskedLM(Bert(vocab_size=300, hidden_size=8, num_layers=1, num_heads=2, intermediate_size=8))
    with pytest.raises(UserError, match="of which Bert trains none"):
        Program(bert.bind(Vocabulary.stand_in(300), 16), TrainConfig(steps=1, batch_size=2),
                OptimizerConfig(name="muon", freeze=("encoder/*",)), mesh)


def test_adamw_is_torchs_without_decay_on_biases_and_norms():
    config = OptimizerConfig(learning_rate=0.03, warmup_steps=3, schedule="cosine", weight_decay=0.2, final_share=0.1)
    theirs = {name: torch.nn.Parameter(torch.tensor(p)) for name, p in flat(parameters()).items()}
    decayed = [p for name, p in theirs.items() if name.endswith(("kernel", "embedding"))]
    others = [p for name, p in theirs.items() if not name.endswith(("kernel", "embedding"))]
    assert len(decayed) == 3 and len(others) == 7
    groups = [{"params": decayed, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-6)
    rate = make_schedule(config, STEPS)
    for step in range(STEPS):
        for name, g in flat(gradients(step)).items():
            theirs[name].grad = torch.tensor(g)
        torch.nn.utils.clip_grad_norm_(theirs.values(), config.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = float(rate(step))
        optimizer.step()
    for name, ours in flat(run(config)).items():
        np.testing.assert_allclose(ours, theirs[name].detach().numpy(), rtol=2e-5, atol=2e-6, err_msg=name)


def test_adagrad_is_torchs():
    config = OptimizerConfig(name="adagrad", learning_rate=0.05, warmup_steps=2, clip_norm=0.0, eps=0.01)
    theirs = {name: torch.nn.Parameter(torch.tensor(p)) for name, p in flat(parameters()).items()}
    optimizer = torch.optim.Adagrad(theirs.values(), initial_accumulator_value=0.01, eps=0.0)
    rate = make_schedule(config, STEPS)
    for step in range(STEPS):
        for name, g in flat(gradients(step)).items():
            theirs[name].grad = torch.tensor(g)
        optimizer.param_groups[0]["lr"] = float(rate(step))
        optimizer.step()
    for name, ours in flat(run(config)).items():
        np.testing.assert_allclose(ours, theirs[name].detach().numpy(), rtol=2e-5, atol=2e-6, err_msg=name)


def test_adafactor_factors_matrices_and_treats_layers_apart():
    """A layer moves exactly as it would without the other ones."""
    # Factoring begins at 128 rows and columns.
    draw = np.random.default_rng(0)
    layers = {name: {"wi": {"kernel": draw.normal(size=(160, 130)).astype(np.float32)}} for name in ("0", "1")}
    config = OptimizerConfig(name="adafactor", learning_rate=0.1, warmup_steps=4, schedule="inverse-sqrt")
    optimizer = make_optimizer(dataclasses.replace(config, clip_norm=0.0), STEPS)

    def steps(params):
        state, update = jax.jit(optimizer.init)(params), updating(optimizer)
        for step in range(3):
            grads = jax.tree.map(lambda p, step=step: np.cos(p * np.float32(step + 1)), jax.device_get(params))
            params, state = update(grads, state, params)
        return params, state

    together, state = steps({"layers": jax.tree.map(lambda *leaves: np.stack(leaves), *layers.values())})
    single, _ = steps(layers["0"])
    np.testing.assert_allclose(together["layers"]["wi"]["kernel"][0], single["wi"]["kernel"], rtol=1e-6)
    sizes = [leaf.size for leaf in jax.tree.leaves(state)]
    assert max(sizes) == 2 * 160, "no second moment is as large as the matrix"


def test_what_decays():
    layer = {"wi/kernel": 1, "wi/bias": 0, "norm/scale": 0, "norm/bias": 0}
    assert flat(jax.tree.map(float, weight_decay_mask(parameters()))) == {"word/embedding": 1, "norm/scale": 0} | {
        f"encoder/layers/{i}/{name}": decays for i in range(2) for name, decays in layer.items()
    }


WSD = dict(schedule="wsd", decay_share=0.2)  # the last 22 of 110 steps


@pytest.mark.parametrize(
    ("config", "corners"),
    [
        (dict(schedule="linear"), {0: 0, 5: 0.5, 10: 1, 60: 0.5, 110: 0, 200: 0}),
        (dict(schedule="linear", final_share=0.2), {10: 1, 60: 0.6, 110: 0.2}),
        (dict(schedule="cosine"), {0: 0, 10: 1, 35: (1 + np.cos(np.pi / 4)) / 2, 60: 0.5, 110: 0}),
        (dict(schedule="cosine", final_share=0.1), {60: 0.55, 110: 0.1}),
        (dict(schedule="constant"), {0: 0, 5: 0.5, 10: 1, 110: 1}),
        (dict(schedule="inverse-sqrt"), {0: 1, 10: 1, 40: 0.5, 90: 1 / 3}),
        (dict(schedule="linear", warmup_steps=0), {0: 1, 55: 0.5, 110: 0}),
        (dict(schedule="constant", warmup_steps=0), {0: 1}),
        (dict(schedule="inverse-sqrt", warmup_steps=0), {0: 1, 1: 1, 4: 0.5}),
        (dict(schedule="linear", warmup_steps=500), {110: 110 / 500}),  # the run ends before its warm-up does
        (WSD, {0: 0, 5: 0.5, 10: 1, 50: 1, 88: 1, 89: 21 / 22, 99: 0.5, 109: 1 / 22, 110: 0, 200: 0}),
        (WSD | dict(final_share=0.2), {88: 1, 99: 0.6, 110: 0.2}),
        (WSD | dict(decay_shape="cosine", final_share=0.1), {88: 1, 99: 0.55, 109: 0.1 + 0.9 * 0.005089, 110: 0.1}),
        (WSD | dict(decay_shape="1-sqrt", final_share=0.2), {
            0: 0, 88: 1, 89: 0.2 + 0.8 * (1 - 22**-0.5), 109: 0.2 + 0.8 * (1 - (21 / 22) ** 0.5), 110: 0.2, 200: 0.2
        }),
        (WSD | dict(warmup_steps=0), {0: 1, 87: 1, 99: 0.5}),
        (WSD | dict(decay_share=0.0), {10: 1, 109: 1}),
        (WSD | dict(decay_share=1.0), {5: 0.5, 10: 1, 60: 0.5, 110: 0}),  # linear
        (WSD | dict(warmup_steps=100), {88: 0.88, 100: 1, 105: 0.5, 110: 0}),  # the decay waits for the warm-up
    ],
)
def test_schedules(config, corners):
    schedule = make_schedule(OptimizerConfig(**({"learning_rate": 2.0, "warmup_steps": 10} | config)), 110)
    for step, share in corners.items():
        assert float(schedule(step)) == pytest.approx(2.0 * share, abs=1e-6), step


def test_more_steps_do_not_change_the_stable_part_of_wsd():
    config = OptimizerConfig(warmup_steps=10, **WSD)
    short, long = (jax.vmap(make_schedule(config, steps))(jnp.arange(110)) for steps in (110, 1100))
    np.testing.assert_array_equal(short[:88], long[:88])
    assert (short[89:] < long[89:]).all()


def test_clipping():
    """A gradient over the limit counts as if it had just that norm, one below as it is; 0 turns it off."""
    def moved(clip_norm, scale):
        config = OptimizerConfig(learning_rate=1.0, warmup_steps=0, weight_decay=0.0, eps=1.0, clip_norm=clip_norm)
        optimizer = make_optimizer(config, 10)
        params = {"kernel": np.zeros(2, np.float32)}
        grads = {"kernel": np.float32(scale) * np.array([3.0, 4.0], np.float32)}
        return jax.jit(lambda grads: optimizer.update(grads, optimizer.init(params), params)[0]["kernel"])(grads)

    np.testing.assert_allclose(moved(1.0, 1.0), moved(0.0, 0.2), rtol=1e-6)
    np.testing.assert_allclose(moved(1.0, 0.1), moved(0.0, 0.1), rtol=1e-6)
    assert not np.allclose(moved(1.0, 1.0), moved(0.0, 1.0))


def test_layers_below_learn_more_slowly():
    """ELECTRA's fine-tuning: rate · d^(n + 2 - depth), depth 0 for embeddings, i + 1 for layer i, n + 2 for heads."""
    plain, decayed = (run(OptimizerConfig(warmup_steps=0, weight_decay=0.0, layer_decay=d), 1) for d in (1.0, 0.5))
    begun = parameters()
    shares = jax.tree.map(lambda a, b, c: float(np.mean((b - c) / (a - c))), plain, decayed, begun)
    assert shares["word"]["embedding"] == pytest.approx(0.5**4, rel=1e-3)
    for layer, factor in (("0", 0.5**3), ("1", 0.5**2)):
        assert jax.tree.leaves(shares["encoder"]["layers"][layer]) == pytest.approx([factor] * 4, rel=1e-3)
    assert shares["norm"]["scale"] == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("model", [Albert, Bert, Deberta, Gpt2, Reformer, T5, Xlnet])
def test_parameters_below_the_layers_have_the_names_of_the_model(model):
    names = jax.eval_shape(model().init, jax.random.key(0)).keys()
    assert set(model.input_params) - {"projection"} <= names  # which only some encoders have


def test_frozen_layers_count_for_layer_decay():
    """Four layers, frozen: the embeddings below them learn at d^(4 + 2) of the head's rate."""
    config = OptimizerConfig(
        learning_rate=0.1, warmup_steps=0, weight_decay=0.0, clip_norm=0.0, layer_decay=0.5, schedule="constant"
    )
    params = {"word": jnp.ones(3), "encoder": {"layers": {"kernel": jnp.ones((4, 2, 2))}}, "head": jnp.ones(3)}
    assert is_stacked("encoder/layers/kernel")
    optimizer = make_optimizer(config, STEPS, input_params=("word",), frozen_params=("encoder",))
    updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, params), optimizer.init(params), params)
    assert not updates["encoder"]["layers"]["kernel"].any()
    np.testing.assert_allclose(updates["word"], 0.5**6 * updates["head"], rtol=1e-6)


def test_xlnet_decays_what_its_own_code_decays():
    """`AdamWeightDecayOptimizer` of model_utils.py, by the names that Transformers has kept from it."""
    objective = PermutationLM(model=Xlnet(vocab_size=8, hidden_size=4, num_layers=1, num_heads=2, intermediate_size=4))
    mask = weight_decay_mask(jax.eval_shape(objective.init, jax.random.key(0)))
    names = {path: entry.theirs for entry in xlnet.table(objective.model).entries for path in entry.ours}
    assert set(names) == set(leaves(mask))
    for path, name in names.items():
        included, excluded = (
            any(re.search(part, name) for part in parts)
            for parts in (["r_s_bias", "r_r_bias", "r_w_bias"], ["LayerNorm", "layer_norm", "bias"])
        )
        assert get(mask, path) == (included or not excluded), name


def test_frozen_parameters_stay_and_have_no_state():
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=0, weight_decay=0.1, clip_norm=0.0)
    optimizer, params = make_optimizer(config, STEPS, frozen_params=("word", "encoder")), stacked(parameters())
    state = optimizer.init(params)
    updates, state = optimizer.update(stacked(gradients(0)), state, params)
    for name, tree in updates.items():
        assert all(bool(leaf.any()) == (name == "norm") for leaf in jax.tree.leaves(tree))
    alone = {"norm": params["norm"]}
    expected, expected_state = make_optimizer(config, STEPS).update(
        {"norm": stacked(gradients(0))["norm"]}, make_optimizer(config, STEPS).init(alone), alone
    )
    np.testing.assert_array_equal(updates["norm"]["scale"], expected["norm"]["scale"])
    assert len(jax.tree.leaves(state)) == len(jax.tree.leaves(expected_state))
