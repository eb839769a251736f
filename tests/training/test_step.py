"""The real train step: against PyTorch over twenty steps, and against itself with accumulation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from jaxlm.training.step import corruption_key, make_eval_step, make_init, make_train_step

from jaxlm.config.experiment import OptimizerConfig
from jaxlm.huggingface.bert import parts
from jaxlm.models.bert import BertConfig
from jaxlm.objectives.masked_lm import BertPretraining
from jaxlm.parallel.mesh import MeshConfig, make_mesh
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training.optimizers import make_optimizer, make_schedule
from jaxlm.types import TokenBatch

LENGTH, ROWS, SEED = 32, 8, 3
MODEL = BertConfig(
    hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64, max_positions=LENGTH, dropout=0.0,
    attention_dropout=0.0,
)
OBJECTIVE = BertPretraining(model=MODEL, short_rate=0.0).bind(Vocabulary.stand_in(160), LENGTH)
MESH = make_mesh(MeshConfig(), jax.devices()[:1])


def batch(step: int, rows: int = ROWS) -> TokenBatch:
    """Rows of all lengths, one of them empty now and then."""
    draw = np.random.default_rng(step)
    width = OBJECTIVE.raw_length(LENGTH)
    sizes = draw.integers(0 if step % 3 == 0 else 4, width + 1, rows)
    real = np.arange(width) < sizes[:, None]
    tokens = np.where(real, draw.integers(107, 160, (rows, width)), 0).astype(np.int32)
    return TokenBatch(tokens, real.astype(np.int32))


def train_step(config: OptimizerConfig, steps: int, accumulate: int = 1):
    optimizer = make_optimizer(config, steps)
    init, _, layout = make_init(OBJECTIVE, optimizer, MESH)
    return init(jax.random.key(0)), make_train_step(
        OBJECTIVE, optimizer, MESH, layout, seed=SEED, accumulate=accumulate
    )


def torch_loss(model: torch.nn.Module, example: dict[str, np.ndarray]) -> torch.Tensor:
    labels = np.full(example["input_ids"].shape, -100, np.int64)
    rows, slots = np.nonzero(example["masked_weights"])
    labels[rows, example["masked_positions"][rows, slots]] = example["masked_labels"][rows, slots]
    asked = example["next_sentence_weights"] > 0
    next_sentence = np.where(asked, example["next_sentence_labels"].astype(np.int64), -100)

    def tensor(name):
        return torch.tensor(example[name].astype(np.int64))

    return model(
        input_ids=tensor("input_ids"), token_type_ids=tensor("token_type_ids"), attention_mask=tensor("attention_mask"),
        labels=torch.tensor(labels), next_sentence_label=torch.tensor(next_sentence),
    ).loss


def test_twenty_steps_as_in_pytorch():
    steps = 20
    config = OptimizerConfig(learning_rate=5e-3, warmup_steps=5)
    state, step_of_ours = train_step(config, steps)
    assert state.step.dtype == jnp.int32 and int(state.step) == 0
    (part,) = parts(OBJECTIVE)
    theirs = transformers.BertForPreTraining(
        transformers.BertConfig(**part.config, attn_implementation="eager")
    ).train()
    weights = part.table.to_transformers(jax.device_get(state.params))
    loaded = theirs.load_state_dict({name: torch.tensor(np.array(value)) for name, value in weights}, strict=False)
    assert not loaded.unexpected_keys
    assert all("decoder" in name or "position_ids" in name for name in loaded.missing_keys), loaded.missing_keys

    decayed = [p for name, p in theirs.named_parameters() if name.endswith("weight") and "LayerNorm" not in name]
    ids = {id(p) for p in decayed}
    others = [p for p in theirs.parameters() if id(p) not in ids]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}], lr=1.0, eps=1e-6
    )
    rate = make_schedule(config, steps)
    ours, reference = [], []
    for step in range(steps):
        example = jax.device_get(jax.jit(OBJECTIVE.corrupt)(corruption_key(SEED, step), batch(step)))
        loss = torch_loss(theirs, example)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), config.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = float(rate(step))
        optimizer.step()
        reference.append(loss.item())
        state, metrics = step_of_ours(state, batch(step))
        ours.append(float(metrics["loss"][0]))
    assert int(state.step) == steps
    assert reference[0] - min(reference) > 0.3, "the model learns, or the comparison says little"
    np.testing.assert_allclose(ours, reference, atol=1e-3)


@pytest.mark.parametrize("accumulate", [4])
def test_accumulation_is_one_larger_batch(accumulate):
    """Rows with equal numbers of predictions in each part, so that the mean of the parts' means is the whole's."""
    config = OptimizerConfig(learning_rate=1e-2, warmup_steps=0)
    whole, step_whole = train_step(config, 5)
    parted, step_parted = train_step(config, 5, accumulate)
    width = OBJECTIVE.raw_length(LENGTH)
    for step in range(3):
        tokens = np.random.default_rng(step).integers(107, 160, (32, width)).astype(np.int32)
        full = TokenBatch(tokens, np.ones_like(tokens))
        whole, metrics = step_whole(whole, full)
        parted, metrics_parted = step_parted(parted, full)
        assert float(metrics_parted["loss"][0] / metrics_parted["loss"][1]) == pytest.approx(
            float(metrics["loss"][0]), abs=1e-5
        )
        # The same masks: as many predictions, and as many of them right.
        for name in ("mlm_accuracy", "nsp_accuracy"):
            assert [float(x) for x in metrics_parted[name]] == [float(x) for x in metrics[name]]
        assert float(metrics_parted["grad_norm"][0]) == pytest.approx(float(metrics["grad_norm"][0]), rel=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), whole.params, parted.params)


def test_an_evaluation_repeats_itself():
    """The same batch gets the same corruption each time, rows of padding weigh nothing, and dropout is off."""
    optimizer = make_optimizer(OptimizerConfig(), 5)
    init, _, layout = make_init(OBJECTIVE, optimizer, MESH)
    params = init(jax.random.key(0)).params
    evaluate = make_eval_step(OBJECTIVE, MESH, layout, seed=SEED)
    one, two = evaluate(params, batch(1), np.int32(0)), evaluate(params, batch(1), np.int32(0))
    other = evaluate(params, batch(1), np.int32(1))
    assert jax.tree.map(float, one) == jax.tree.map(float, two)
    assert float(one["loss"][0]) != float(other["loss"][0])
    half = TokenBatch(*(np.where(np.arange(ROWS)[:, None] < 4, x, 0) for x in batch(1)))
    assert float(evaluate(params, half, np.int32(0))["loss"][1]) == 4
    empty = TokenBatch(*(np.zeros_like(x) for x in batch(1)))
    assert [float(x) for x in evaluate(params, empty, np.int32(0))["mlm_loss"]] == [0, 0]


