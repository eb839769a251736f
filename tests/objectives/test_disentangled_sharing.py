"""DeBERTa v3's objective: loss and gradients against PyTorch, and which loss trains which parameters."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxlm.huggingface.deberta import FAMILY
from jaxlm.models.deberta import DebertaV3
from jaxlm.objectives import chunked_loss
from jaxlm.objectives.base import total_loss
from jaxlm.objectives.replaced_tokens import ReplacedTokens
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.trees import leaves
from jaxlm.types import TokenBatch
from tests.params import random_params

NETWORKS = ("generator", "discriminator")
VOCABULARY = Vocabulary.stand_in(160)
LENGTH = 40
MODEL = DebertaV3(
    hidden_size=16, num_layers=1, num_heads=2, intermediate_size=24, generator_num_layers=2, max_positions=LENGTH,
    position_buckets=8, init_std=0.1,
)


def bound(**changes) -> ReplacedTokens:
    settings = dict(mask_share=1.0, discriminator_weight=10.0, two_segments=False, short_rate=0.0) | changes
    return ReplacedTokens(model=MODEL, **settings).bind(VOCABULARY, LENGTH)


def example_of(objective: ReplacedTokens, rows: int = 6):
    rng = np.random.default_rng(0)
    length = objective.row_format(LENGTH).length
    real = np.arange(length) < np.array([length, *rng.integers(3, length, rows - 1)])[:, None]
    batch = TokenBatch(np.where(real, rng.integers(107, 160, real.shape), 0).astype(np.int32), real.astype(np.int32))
    return jax.device_get(jax.jit(objective.corrupt)(jax.random.key(1), batch))


@functools.partial(jax.jit, static_argnums=0)
def losses_and_gradients(objective: ReplacedTokens, params, example):
    """Return the mean loss of each network, and its gradients."""
    def losses(params):
        terms = objective.loss(params, example, jax.random.key(3), False)
        return {name: total_loss({name: terms[f"{name}_loss"]}) for name in NETWORKS}

    found, pull_back = jax.vjp(losses, params)
    ones = {name: {other: jnp.float32(other == name) for other in NETWORKS} for name in NETWORKS}
    return found, {name: pull_back(one)[0] for name, one in ones.items()}


def torch_networks(objective: ReplacedTokens, params) -> tuple[list[torch.nn.Module], list[dict[str, torch.Tensor]]]:
    """Return discriminator and generator, and their tensors by name, those that the classes lack among them."""
    networks, tensors = [], []
    for model in FAMILY.models(objective):
        network = getattr(transformers, model.architecture)(transformers.DebertaV2Config(**model.config)).eval()
        body = network.base_model
        values = {name: torch.tensor(np.array(value)) for name, value in model.table.to_transformers(
            FAMILY.export_params(objective, params))}
        body.load_state_dict({name.removeprefix("deberta."): value for name, value in values.items()
                              if name.startswith("deberta.") and "position_embeddings" not in name})
        named = {f"deberta.{name}": parameter for name, parameter in body.named_parameters()}
        others = {name: value.requires_grad_() for name, value in values.items() if name not in named}
        networks.append(body)
        tensors.append(named | others)
    return networks, tensors


def decode_masks(body: torch.nn.Module, w: dict[str, torch.Tensor], ids, mask) -> torch.Tensor:
    """Return the generator's logits as microsoft/DeBERTa computes them, with the layers of Transformers."""
    hidden = body(ids, mask, output_hidden_states=True).hidden_states[-2]
    states = hidden + w["deberta.embeddings.position_embeddings.weight"][: ids.shape[1]]
    for _ in range(2):
        states, _ = body.encoder.layer[-1](
            hidden, body.encoder.get_attention_mask(mask), query_states=states,
            relative_pos=body.encoder.get_rel_pos(hidden), rel_embeddings=body.encoder.get_rel_embedding(),
        )
    functional, head = torch.nn.functional, "lm_predictions.lm_head"
    x = functional.gelu(states @ w[f"{head}.dense.weight"].T + w[f"{head}.dense.bias"])
    x = functional.layer_norm(x, x.shape[-1:], w[f"{head}.LayerNorm.weight"], w[f"{head}.LayerNorm.bias"], 1e-7)
    return x @ w["deberta.embeddings.word_embeddings.weight"].T + w[f"{head}.bias"]


def detect(body: torch.nn.Module, w: dict[str, torch.Tensor], ids, mask) -> torch.Tensor:
    functional, hidden = torch.nn.functional, body(ids, mask).last_hidden_state
    x = functional.layer_norm(hidden + hidden[:, :1], hidden.shape[-1:], w["mask_predictions.LayerNorm.weight"],
                              w["mask_predictions.LayerNorm.bias"], 1e-7)
    x = functional.gelu(x @ w["mask_predictions.dense.weight"].T + w["mask_predictions.dense.bias"])
    return (x @ w["mask_predictions.classifier.weight"].T + w["mask_predictions.classifier.bias"])[..., 0]


@pytest.mark.slow
def test_losses_and_gradients_as_in_pytorch(monkeypatch):
    """The gradient of the discriminator's whole table is that of E_Δ. No parameter has a gradient from both losses:
    ∂RTD/∂E_G = 0 and ∂MLM/∂E_Δ = 0 exactly."""
    objective = bound()
    params, example = random_params(objective), example_of(objective)
    rng, labels = np.random.default_rng(5), example["masked_labels"]
    samples = np.where(rng.random(labels.shape) < 0.3, labels, rng.integers(107, 160, labels.shape)).astype(np.int32)
    monkeypatch.setattr(chunked_loss, "sample_tokens", lambda uniform, logits, temperature: jnp.asarray(samples))
    found, gradients = jax.device_get(losses_and_gradients(objective, params, example))

    (discriminator, generator), (own, other) = torch_networks(objective, params)
    rows, slots = np.nonzero(example["masked_weights"])
    places = rows, example["masked_positions"][rows, slots]
    assert (example["input_ids"][places] == VOCABULARY.mask).all()
    mask, original = (torch.tensor(example[name]).long() for name in ("attention_mask", "original_ids"))
    predicted = decode_masks(generator, other, torch.tensor(example["input_ids"]).long(), mask)[places]
    generator_loss = torch.nn.functional.cross_entropy(predicted, original[places])
    ids = original.clone()
    ids[places] = torch.tensor(samples[rows, slots]).long()
    judged, real = detect(discriminator, own, ids, mask), mask > 0
    discriminator_loss = torch.nn.functional.binary_cross_entropy_with_logits(
        judged[real], (ids != original)[real].float())
    (generator_loss + 10.0 * discriminator_loss).backward()

    assert found["generator"] == pytest.approx(generator_loss.item(), rel=1e-5)
    assert found["discriminator"] == pytest.approx(10.0 * discriminator_loss.item(), rel=1e-5)
    expected = {}
    for model, tensors in zip(FAMILY.models(objective), (own, other), strict=True):
        by_name = {name: tensor.grad.numpy() for name, tensor in tensors.items()}
        shapes = {name: gradient.shape for name, gradient in by_name.items()}
        expected |= model.table.from_transformers(shapes, by_name.__getitem__, params, "")
    assert expected.keys() == set(leaves(params))
    scale = max(float(np.abs(gradient).max()) for gradient in expected.values())
    for network, other in (NETWORKS, NETWORKS[::-1]):
        for path, leaf in zip(leaves(params), jax.tree.leaves(gradients[network]), strict=True):
            if path.startswith("generator") == (network == "generator"):
                np.testing.assert_allclose(leaf, expected[path], atol=2e-5 * scale, err_msg=path)
                assert leaf.any()
            else:
                assert not leaf.any(), f"{network}'s loss trains {path}, which is the {other}'s"
