"""The real train step: against PyTorch over twenty steps, and against itself with accumulation."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxlm.config.experiment import OptimizerConfig, TrainConfig
from jaxlm.huggingface.families import family_of
from jaxlm.keys import Purpose, purpose_key
from jaxlm.models.bert import Bert
from jaxlm.models.electra import Electra
from jaxlm.models.t5 import T5
from jaxlm.objectives.base import Objective, total_loss
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.replaced_tokens import ReplacedTokens
from jaxlm.objectives.span_corruption import SpanCorruption
from jaxlm.parallel.mesh import MeshConfig, make_mesh
from jaxlm.parallel.rules import is_stacked
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training.loop import evaluate
from jaxlm.training.optimizers import make_schedule
from jaxlm.training.program import Program, TrainState, corruption_key, keep_unused
from jaxlm.trees import path_string
from jaxlm.types import TokenBatch

LENGTH, ROWS, SEED = 32, 8, 3
MODEL = Bert(
    hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64, max_positions=LENGTH, dropout=0.0,
    attention_dropout=0.0,
)
OBJECTIVE = MaskedLM(model=MODEL, short_rate=0.0).bind(Vocabulary.stand_in(160), LENGTH)
CORRUPT = jax.jit(OBJECTIVE.corrupt)
MESH = make_mesh(MeshConfig(), jax.devices()[:1])


def batch(step: int, rows: int = ROWS) -> TokenBatch:
    """Rows of all lengths, one of them empty now and then."""
    draw = np.random.default_rng(step)
    width = OBJECTIVE.row_format(LENGTH).length
    sizes = draw.integers(0 if step % 3 == 0 else 4, width + 1, rows)
    real = np.arange(width) < sizes[:, None]
    tokens = np.where(real, draw.integers(107, 160, (rows, width)), 0).astype(np.int32)
    return TokenBatch(tokens, real * np.arange(1, rows + 1, dtype=np.int32)[:, None])  # a document a row


@functools.cache
def program_of(
    config: OptimizerConfig | None = None, steps: int = 5, accumulate: int = 1, rows: int = ROWS,
    objective: Objective = OBJECTIVE,
) -> Program:
    train = TrainConfig(steps=steps, batch_size=rows, accumulate=accumulate, seed=SEED)
    return Program(objective, train, config or OptimizerConfig(), MESH)


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
    program = program_of(config, steps)
    state = program.init_state(program.init_params(0))
    assert state.step.dtype == jnp.int32 and int(state.step) == 0
    (counterpart,) = family_of(OBJECTIVE).models(OBJECTIVE)
    theirs = transformers.BertForPreTraining(
        transformers.BertConfig(**counterpart.config, attn_implementation="eager")
    ).train()
    weights = counterpart.table.to_transformers(jax.device_get(state.params))
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
        example = jax.device_get(CORRUPT(corruption_key(SEED, step), batch(step)))
        loss = torch_loss(theirs, example)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), config.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = float(rate(step))
        optimizer.step()
        reference.append(loss.item())
        state, terms = program.train_step(state, batch(step), ())
        ours.append(float(terms["loss"].total))
    assert int(state.step) == steps
    assert reference[0] - min(reference) > 0.3, "the model learns, or the comparison says little"
    np.testing.assert_allclose(ours, reference, atol=1e-3)


@pytest.mark.slow  # test_accumulation.py has the gradients and terms of one step
@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulation_is_one_larger_batch(accumulate):
    """Though rows have different numbers of predictions, and some none."""
    config = OptimizerConfig(learning_rate=1e-2, warmup_steps=0)
    whole, parted = program_of(config, rows=32), program_of(config, rows=32, accumulate=accumulate)
    state_whole, state_parted = whole.init_state(whole.init_params(0)), parted.init_state(parted.init_params(0))
    for step in range(3):
        full = batch(step, 32)
        state_whole, terms = whole.train_step(state_whole, full, ())
        state_parted, terms_parted = parted.train_step(state_parted, full, ())
        assert float(terms_parted["loss"].total) == pytest.approx(float(terms["loss"].total), abs=1e-5)
        # The same masks: as many predictions, and as many of them right.
        for name in ("mlm_accuracy", "nsp_accuracy"):
            assert [float(x) for x in terms_parted[name][:2]] == [float(x) for x in terms[name][:2]]
        assert float(terms_parted["grad_norm"].total) == pytest.approx(float(terms["grad_norm"].total), rel=1e-4)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), state_whole.params, whole.init_params(0))
    # Far more than the tolerance below; but the biases of the keys, which are one array, have no gradient.
    assert sum(most > 5e-3 for most in jax.tree.leaves(moved)) == len(jax.tree.leaves(moved)) - 1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), state_whole.params, state_parted.params)


def test_an_evaluation_repeats_itself():
    """The same batch gets the same corruption each time, rows of padding weigh nothing, and dropout is off."""
    wet = dataclasses.replace(OBJECTIVE, model=dataclasses.replace(OBJECTIVE.model, dropout=0.3))
    program = program_of(objective=wet)
    params = program.init_params(0)

    def terms(batch: TokenBatch, index: int) -> dict[str, tuple[float, ...]]:
        found, _ = program.eval_step(params, batch, np.int32(index), (), ())
        return {name: tuple(map(float, term)) for name, term in found.items()}

    one = terms(batch(1), 0)
    assert terms(batch(1), 0) == one
    assert terms(batch(1), 1)["mlm_loss"] != one["mlm_loss"]
    dry, _ = program_of().eval_step(params, batch(1), np.int32(0), (), ())
    assert one["mlm_loss"][0] == pytest.approx(float(dry["mlm_loss"].total), rel=1e-6)
    half = TokenBatch(*(np.where(np.arange(ROWS)[:, None] < 4, x, 0) for x in batch(1)[:2]))
    assert terms(half, 0)["nsp_loss"][1] == 4
    empty = TokenBatch(*(np.zeros_like(x) for x in batch(1)[:2]))
    assert terms(empty, 0)["mlm_loss"][:2] == terms(empty, 0)["nsp_loss"][:2] == (0, 0)


def test_what_belongs_to_unused_parameters_stays():
    new, old = (({"encoder": {"kernel": x}, "nsp_head": {"kernel": x}}, {"mu": {"nsp_head": {"kernel": x}}, "count": x})
                for x in (1, 0))
    kept = keep_unused(new, old, ("nsp_head/kernel",))
    params, moments = kept
    assert params == {"encoder": {"kernel": 1}, "nsp_head": {"kernel": 0}}
    assert moments == {"mu": {"nsp_head": {"kernel": 0}}, "count": 1}


def test_an_evaluation_of_several_batches_is_that_of_one():
    """Σ coefficient · total / weight over all of the held-out rows: a mean of the batches' losses is another number."""
    program = program_of()
    state = program.init_state(program.init_params(0))
    # Of full rows, of rows of two words, and of one row in eight.
    full, short, few = (batch(step) for step in (1, 4, 5))
    short = TokenBatch(*(np.where(np.arange(x.shape[1]) < 6, x, 0) for x in short[:2]))
    few = TokenBatch(*(np.where(np.arange(ROWS)[:, None] < 1, x, 0) for x in few[:2]))

    class Batches:
        def __init__(self):
            self.held_out_shares = {"": 1.0}

        def held_out(self, objective, source):
            return iter((full, short, few))

    found = evaluate(program, state, Batches())
    examples = []
    for index, rows in enumerate((full, short, few)):
        key, _ = jax.random.split(jax.random.fold_in(purpose_key(0, Purpose.EVALUATION), index))
        examples.append(CORRUPT(key, rows))
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *examples)

    @jax.jit
    def loss_of(params, example):
        return total_loss(OBJECTIVE.loss(params, example, jax.random.key(0), False))

    losses = [float(loss_of(state.params, example)) for example in examples]
    assert len({float(example["masked_weights"].sum()) for example in examples}) == 3
    assert found["loss"] == pytest.approx(float(loss_of(state.params, joined)), rel=1e-6)
    assert abs(np.mean(losses) - found["loss"]) > 1e-3

    averaged = program_of(OptimizerConfig(average=0.5))  # evaluates the average and not the parameters
    other = averaged.init_state(averaged.init_params(1)).params
    state = averaged.init_state(averaged.init_params(0))._replace(average=other)
    assert evaluate(averaged, state, Batches())["loss"] == pytest.approx(
        evaluate(program, program.init_state(other), Batches())["loss"], rel=1e-6
    )


SIZES = dict(vocab_size=160, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64)
UNEVEN = {
    "t5": SpanCorruption(model=T5(**SIZES, num_decoder_layers=1, head_dim=8)),
    "electra": ReplacedTokens(model=Electra(
        **SIZES, embedding_size=32, generator_hidden_size=16, generator_num_layers=1, generator_num_heads=2,
        generator_intermediate_size=32, max_positions=LENGTH,
    )),
}


# Adafactor alone depends on more than a layer's norm; the others compile for long.
@pytest.mark.slow
@pytest.mark.parametrize(("system", "name"), [
    ("t5", "adafactor"), ("electra", "lamb"), ("t5", "lamb"), ("electra", "adafactor"),
])
def test_stacks_of_different_depth_are_trained(system, name):
    """Every matrix of every layer moves, in optimizers whose updates depend on the shape of a parameter."""
    objective = UNEVEN[system].bind(Vocabulary.stand_in(160), LENGTH)
    config = OptimizerConfig(name=name, learning_rate=1e-2, warmup_steps=0, schedule="constant", weight_decay=0.0)
    program = program_of(config, objective=objective)
    state: TrainState = program.init_state(program.init_params(0))
    before = jax.device_get(state.params)
    draw = np.random.default_rng(0)
    for step in range(2):
        tokens = draw.integers(107, 160, (ROWS, objective.row_format(LENGTH).length)).astype(np.int32)
        state, terms = program.train_step(state, TokenBatch(tokens, np.ones_like(tokens)), ())
        assert np.isfinite(float(terms["loss"].total)) and int(state.step) == step + 1
    moved = jax.tree.map(lambda a, b: np.abs(a - b), before, jax.device_get(state.params))
    leaves = [(path_string(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(moved)]
    for path, leaf in leaves:
        for layer in leaf if is_stacked(path) else [leaf]:
            assert not path.endswith(("kernel", "embedding")) or layer.max() > 1e-5, path
    depths = {path.split("/layers/")[0]: leaf.shape[0] for path, leaf in leaves if "/layers/" in path}
    assert sorted(depths.values()) == [1, 2]
