"""TinyBERT's general distillation: its loss against the formula in NumPy, its export, unsuitable teachers."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxlm.config.presets import load_preset
from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.models.base import Inputs
from jaxlm.models.bert import Bert
from jaxlm.objectives.base import class_of, total_loss
from jaxlm.objectives.layer_distillation import LayerDistillation
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import TokenBatch
from tests.huggingface.support import VOCAB, batch, real, save_torch, torch_outputs
from tests.params import first_fast, random_params

VOCABULARY = Vocabulary.stand_in(160)
SIZES = dict(hidden_size=16, num_heads=2, intermediate_size=32, max_positions=32, init_std=0.2, dropout=0.0,
             attention_dropout=0.0)
LENGTH = 24


@functools.cache
def teacher(**changes) -> PretrainedModel:
    sizes = SIZES | dict(num_layers=2, hidden_size=24) | changes
    objective = MaskedLM(model=Bert(**sizes)).bind(VOCABULARY, LENGTH)
    return PretrainedModel(objective, jax.jit(objective.init)(jax.random.key(7)))


def student(layers: int = 1) -> LayerDistillation:
    model = Bert(**SIZES, num_layers=layers)
    return LayerDistillation(model=model, teacher="somewhere", teacher_hidden_size=24).bind(VOCABULARY, LENGTH)


def torch_states(model: torch.nn.Module, inputs: dict[str, np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return hidden states and scores before the softmax of a Transformers BERT.

    Transformers returns probabilities only, so the scores are computed from its matrices, layer by layer.
    """
    hidden = [h.numpy() for h in torch_outputs(model, inputs).hidden_states]
    heads, scores = model.config.num_attention_heads, []
    for layer, states in zip(model.encoder.layer, hidden, strict=False):
        own = layer.attention.self

        def split(linear: torch.nn.Linear, states: np.ndarray = states) -> np.ndarray:
            y = states @ linear.weight.detach().numpy().T + linear.bias.detach().numpy()
            return y.reshape(*y.shape[:2], heads, -1)

        query, key = split(own.query), split(own.key)
        scores.append(np.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1]))
    return hidden, scores


def test_loss_is_the_formula_over_their_states(tmp_path, vocab_file):
    """Jiao et al. 2020, equations 7 to 9, with layers 2 and 4 of four, and states 0, 2 and 4."""
    def loaded(name: str, **changes):
        torch.manual_seed(len(name))
        sizes = dict(num_attention_heads=2, intermediate_size=32, max_position_embeddings=32, initializer_range=0.2)
        model = transformers.BertModel(transformers.BertConfig(**sizes, **changes, vocab_size=len(VOCAB))).eval()
        return model, import_folder(save_torch(model, tmp_path / name, vocab_file))

    large, theirs = loaded("teacher", hidden_size=24, num_hidden_layers=4)
    small, ours = loaded("student", hidden_size=16, num_hidden_layers=2)
    quiet = dataclasses.replace(ours.objective.model, dropout=0.0, attention_dropout=0.0)
    objective = LayerDistillation(model=quiet, teacher="somewhere", teacher_hidden_size=24)
    vocabulary = dataclasses.replace(ours.tokenizer.vocabulary, preserve_rows=True)
    objective = objective.bind(vocabulary, LENGTH)
    frozen = objective.load_constants(vocabulary, lambda path: PretrainedModel(theirs.objective, theirs.params))
    rng = np.random.default_rng(0)
    kernel, bias = (rng.normal(size=shape).astype(np.float32) for shape in ((16, 24), (24,)))
    params = {name: ours.params[name] for name in ("embeddings", "encoder")}
    params |= {"projection": {"kernel": kernel, "bias": bias}}
    inputs = batch(quiet, LENGTH, True)
    example = {name: jnp.asarray(value, jnp.int32) for name, value in inputs.items()}
    taught = objective.with_constants(frozen)
    terms = jax.jit(lambda p, e: taught.loss(p, e, jax.random.key(0), True))(params, example)

    (hidden, scores), (their_hidden, their_scores) = torch_states(small, inputs), torch_states(large, inputs)
    sizes = inputs["attention_mask"].sum(1)
    of_hidden = sum(
        np.mean(np.square(real(h @ kernel + bias - t, inputs)))
        for h, t in zip(hidden, their_hidden[::2], strict=True)
    )
    squares = [
        [np.sum(np.square((s - t)[row, :, :n, :n])) for row, n in enumerate(sizes)]
        for s, t in zip(scores, (their_scores[1], their_scores[3]), strict=True)
    ]
    of_scores = np.sum(squares) / (2 * np.sum(sizes**2))
    assert float(terms["hidden_loss"].total / terms["hidden_loss"].weight) == pytest.approx(of_hidden, rel=1e-4)
    assert float(terms["attention_loss"].total / terms["attention_loss"].weight) == pytest.approx(of_scores, rel=1e-4)
    assert float(total_loss(terms)) == pytest.approx(of_hidden + of_scores, rel=1e-4)


@pytest.mark.slow
def test_rows_are_berts():
    """Pairs and masks by BERT's code; empty rows have no weight."""
    objective = student()
    tokens = np.random.default_rng(0).integers(107, 160, (8, objective.row_format(LENGTH).length)).astype(np.int32)
    segments = np.ones_like(tokens)
    segments[3:] = 0
    rows = TokenBatch(jnp.asarray(np.where(segments, tokens, 0)), jnp.asarray(segments))
    example = jax.device_get(jax.jit(objective.corrupt)(jax.random.key(1), rows))
    assert example["input_ids"].shape == (8, LENGTH) and example["token_type_ids"].max() == 1
    assert (example["input_ids"] == VOCABULARY.mask).any() and example["attention_mask"][3:].sum() == 0
    lines = objective.describe(rows, example, 0)
    assert "masked" in lines[1].marks and lines[-1].title.startswith("imitate")


@pytest.mark.slow
def test_the_teacher_gets_no_gradient():
    objective = student()
    loaded = objective.load_constants(objective.vocabulary, lambda path: teacher())
    assert set(loaded.params) == {"embeddings", "encoder"}
    inputs = batch(objective.model, LENGTH, True)
    example = {name: jnp.asarray(value, jnp.int32) for name, value in inputs.items()}

    @jax.jit
    def gradients(params, frozen):
        def loss(params, frozen):
            own = objective.with_constants(PretrainedModel(loaded.objective, frozen))
            return total_loss(own.loss(params, example, jax.random.key(0), True))
        return jax.grad(loss, (0, 1))(params, frozen)

    ours, theirs = gradients(jax.jit(objective.init)(jax.random.key(0)), loaded.params)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(theirs))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(ours["projection"]))
    assert np.any(ours["encoder"]["layers"]["attention"]["query"]["kernel"][0])


def test_export_is_a_bert_without_the_projection(tmp_path, tokenizer):
    model = Bert(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48, max_positions=33, init_std=0.01)
    objective = LayerDistillation(model=model, teacher="gone").bind(tokenizer.vocabulary, 33)
    params = random_params(objective, 1)
    out = export_folder(tmp_path / "out", objective, params, tokenizer, ModelCard())
    theirs, report = transformers.AutoModel.from_pretrained(out, output_loading_info=True)
    assert type(theirs) is transformers.BertModel and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert {name.split(".")[0] for name in report["missing_keys"]} == {"pooler"}  # untrained
    inputs = batch(objective.model, 21, True)
    ours = jax.jit(objective.model.hidden_states)(params, Inputs.of(inputs))
    expected = real(torch_outputs(theirs.eval(), inputs).last_hidden_state.numpy(), inputs)
    assert np.abs(real(ours, inputs) - expected).max() < 1e-4
    # It is imported as a BERT with a fresh head, for more training or fine-tuning.
    imported = import_folder(out)
    assert class_of(imported.objective) is MaskedLM and imported.fresh == ("mlm_head",)
    jax.tree.map(np.testing.assert_array_equal, imported.params["encoder"], params["encoder"])


# Parameters with a pooler, as in the published weights; the projection is ours.
@pytest.mark.parametrize(("size", "published", "pooler"), first_fast([(4, 14_350_248, 312), (6, 66_955_008, 768)]))
def test_published_sizes(size, published, pooler):
    experiment = load_preset(str(Path(__file__).parents[2] / "configs" / f"tinybert_{size}.py"))
    shapes = jax.eval_shape(experiment.objective.init, jax.random.key(0))
    count = sum(leaf.size for name in ("embeddings", "encoder") for leaf in jax.tree.leaves(shapes[name]))
    assert count + pooler * pooler + pooler == published
    assert shapes["projection"]["kernel"].shape == (pooler, 768)
    o = experiment.optimizer
    assert (o.learning_rate, o.weight_decay, experiment.train.batch_size, experiment.data.length) == (
        5e-5, 0.01, 256, 128)


@pytest.mark.parametrize(
    ("layers", "changes", "words"),
    [
        (1, dict(num_heads=4), r"num_heads 4 \(the student 2\); add --objective.model.num-heads 4"),
        (1, dict(hidden_size=32), r"teacher_hidden_size is 24\); add --objective\.teacher-hidden-size 32,"),
        (2, dict(num_layers=3), "3 layers, which do not map onto the student's 2; add --objective.model.num-layers 1,"),
        (1, dict(max_positions=25), r"25 positions \(the student 32\); add --objective.model.max-positions 25,"),
    ],
)
def test_unsuitable_teachers_are_refused(layers, changes, words):
    loaded = PretrainedModel(MaskedLM(model=Bert(**(SIZES | dict(num_layers=2, hidden_size=24) | changes))).bind(
        VOCABULARY, LENGTH), teacher().params)
    with pytest.raises(UserError, match=words) as error:
        student(layers).load_constants(VOCABULARY, lambda path: loaded)
    assert "\n" not in str(error.value)
