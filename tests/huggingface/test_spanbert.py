"""SpanBERT against BertModel and BertForMaskedLM, and its loss against a slow version, span by span, in PyTorch."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.numpy import load_file

from jaxlm.config.presets import load_preset
from jaxlm.data.base import Statistics
from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.inference.fill_mask import fill_mask
from jaxlm.models.base import Inputs
from jaxlm.models.bert import Bert
from jaxlm.objectives.base import total_loss
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.objectives.span_boundary import SpanBoundary
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import TokenBatch
from tests.huggingface.support import batch, real, torch_outputs
from tests.params import first_fast, random_params

LENGTH, ROWS = 40, 6
MODEL = Bert(
    hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48, max_positions=LENGTH, dropout=0.0,
    attention_dropout=0.0,
)


@pytest.fixture(scope="module")
def objective(tokenizer: Tokenizer) -> SpanBoundary:
    """Return an objective with few offsets and a high rate, so that some spans exceed the predicted offsets."""
    bound = SpanBoundary(model=MODEL, mask_rate=0.4, boundary_offsets=4, offset_size=6, boundary_weight=0.7)
    return bound.bind(tokenizer.vocabulary, LENGTH)


@pytest.fixture(scope="module")
def exported(objective, tokenizer, tmp_path_factory):
    params = random_params(objective, 1)
    return params, export_folder(tmp_path_factory.mktemp("spanbert") / "out", objective, params, tokenizer, ModelCard())


def test_export_is_a_bert_without_the_private_head(objective, exported, tokenizer):
    params, out = exported
    assert not any("sbo" in name or "offset" in name for name in load_file(out / "model.safetensors"))
    inputs = batch(objective.model, 21, True)
    hidden = jax.jit(objective.model.hidden_states)(params, Inputs.of(inputs))
    bare = transformers.BertModel.from_pretrained(out).eval()
    expected = real(torch_outputs(bare, inputs).last_hidden_state.numpy(), inputs)
    assert np.abs(real(hidden, inputs) - expected).max() < 1e-4
    theirs, report = transformers.AutoModelForMaskedLM.from_pretrained(out, output_loading_info=True)
    assert type(theirs) is transformers.BertForMaskedLM
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = real(torch_outputs(theirs.eval(), inputs).logits.numpy(), inputs)
    logits = real(jax.jit(objective.model.predict_tokens)(params, hidden), inputs)
    assert np.abs(logits - expected).max() < 1e-4
    answers = fill_mask(PretrainedModel(objective, params, tokenizer), ["the [MASK] sat"], 3)[0][0]
    library = transformers.pipeline("fill-mask", model=str(out), tokenizer=str(out), top_k=3)("the [MASK] sat")
    np.testing.assert_allclose([p for _, p in answers], [entry["score"] for entry in library], atol=1e-5)


@pytest.mark.slow
def test_a_spanbert_is_initialized_from_a_bert(objective, exported):
    """An import is a BERT; --init-from loads its weights into a SpanBERT, whose own head is fresh."""
    params, out = exported
    imported = import_folder(out)
    assert type(imported.objective.model) is Bert and imported.objective.input_format == "document"
    experiment = load_preset(str(Path(__file__).parents[2] / "configs" / "spanbert_tiny.py"))
    own = experiment.objective.with_pretrained_model(imported).bind(imported.tokenizer.vocabulary, LENGTH)
    fresh = jax.jit(own.init)(jax.random.key(0))
    begun = own.merge_pretrained(fresh, imported)
    np.testing.assert_array_equal(begun["mlm_head"]["bias"], params["mlm_head"]["bias"])
    np.testing.assert_array_equal(begun["sbo_head"]["bias"], fresh["sbo_head"]["bias"])


@functools.cache
def text() -> TokenBatch:
    rng = np.random.default_rng(0)
    real = np.arange(LENGTH - 2) < np.array([38, 20, 7, 0, 38, 1])[:, None]
    tokens = np.where(real, rng.integers(5, 60, real.shape), 0)
    return TokenBatch(tokens.astype(np.int32), np.where(real, 1 + np.arange(ROWS)[:, None], 0).astype(np.int32))


def slow_loss(objective: SpanBoundary, example, model, head) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Return sums over rows, spans and tokens: masked LM, span boundary, and the targets of each."""
    original = text().tokens
    ids, mask = (torch.tensor(example[name].astype(np.int64)) for name in ("input_ids", "attention_mask"))
    hidden = model.bert(input_ids=ids, attention_mask=mask).last_hidden_state
    logits, words = model.cls(hidden), model.bert.embeddings.word_embeddings.weight
    totals, counts = [torch.zeros(()), torch.zeros(())], [0, 0]
    for row in range(ROWS):
        size = int((text().segment_ids[row] > 0).sum())
        used = example["masked_weights"][row] > 0
        masked = example["masked_positions"][row][used]
        for span in np.split(masked, np.flatnonzero(np.diff(masked) > 1) + 1) if len(masked) else []:
            for place, position in enumerate(span):
                label = torch.tensor([int(original[row, position - 1])])  # [CLS] precedes the text
                totals[0] = totals[0] + F.cross_entropy(logits[row, position][None], label)
                counts[0] += 1
                if span[0] == 1 or span[-1] == size or place >= objective.boundary_offsets:
                    continue
                x = torch.cat([hidden[row, span[0] - 1], hidden[row, span[-1] + 1], head["offset/embedding"][place]])
                for layer in "01":
                    x = F.gelu(x @ head[f"dense_{layer}/kernel"] + head[f"dense_{layer}/bias"])
                    x = F.layer_norm(x, x.shape, head[f"norm_{layer}/scale"], head[f"norm_{layer}/bias"], 1e-12)
                totals[1] = totals[1] + F.cross_entropy((words @ x + head["bias"])[None], label)
                counts[1] += 1
    return *totals, *counts


@pytest.mark.slow
def test_loss_and_gradients_of_the_slow_version(objective, exported):
    params, out = exported
    example = jax.device_get(jax.jit(objective.corrupt)(jax.random.key(3), text()))
    assert not example["masked_weights"][3].any()  # an empty row

    def loss(params, example):
        terms = objective.loss(params, example, jax.random.key(0), False)
        return total_loss(terms), terms

    (value, terms), gradients = jax.device_get(jax.jit(jax.value_and_grad(loss, has_aux=True))(params, example))
    model = transformers.BertForMaskedLM.from_pretrained(out).eval()
    flat = {"/".join(entry.key for entry in path): torch.tensor(leaf, requires_grad=True)
            for path, leaf in jax.tree_util.tree_leaves_with_path(params["sbo_head"])}
    mlm, sbo, tokens, targets = slow_loss(objective, example, model, flat)
    assert 0 < targets < tokens - 5  # some spans are at an end of the row, some too long
    assert (terms["mlm_loss"].weight, terms["sbo_loss"].weight) == (tokens, targets)
    assert terms["mlm_loss"].total == pytest.approx(mlm.item(), rel=1e-5)
    assert terms["sbo_loss"].total == pytest.approx(sbo.item(), rel=1e-5)
    expected = mlm / tokens + 0.7 * sbo / targets
    assert value == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    own = {"/".join(entry.key for entry in path): leaf
           for path, leaf in jax.tree_util.tree_leaves_with_path(gradients["sbo_head"])}
    for name, parameter in flat.items():
        np.testing.assert_allclose(own[name], parameter.grad, atol=1e-5, err_msg=name)
    bert = model.bert
    for ours, theirs in (
        (gradients["embeddings"]["position"]["embedding"], bert.embeddings.position_embeddings.weight.grad),
        (gradients["encoder"]["layers"]["mlp"]["wi"]["kernel"][0].T,
         bert.encoder.layer[0].intermediate.dense.weight.grad),
        (gradients["mlm_head"]["bias"], model.cls.predictions.bias.grad),
    ):
        assert theirs.abs().max() > 1e-3
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_random_tokens_follow_the_corpus():
    counts = np.zeros(200, np.int64)
    counts[[150, 160]] = 3, 1
    objective = SpanBoundary(model=MODEL, mask_rate=0.5, mask_share=0.0, random_share=1.0)
    evenly = np.asarray(objective.bind(Vocabulary.stand_in(200), LENGTH)._token_share())
    assert evenly[106] == 0 < evenly[107]  # no symbols without a corpus
    objective = objective.bind(Vocabulary.stand_in(200), LENGTH, Statistics(counts, 0.0))
    full = TokenBatch(np.full((64, LENGTH - 2), 110, np.int32), np.ones((64, LENGTH - 2), np.int32))
    example = jax.device_get(jax.jit(objective.corrupt)(jax.random.key(0), full))
    drawn = np.take_along_axis(example["input_ids"], example["masked_positions"], 1)[example["masked_weights"] > 0]
    assert set(drawn) == {150, 160} and abs((drawn == 150).mean() - 0.75) < 0.05


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(mask_rate=1.0), "mask_rate is 1.0"), (dict(span_success=0.0), "span_success is 0.0"),
        (dict(longest_span=0), "longest_span is 0"), (dict(mask_share=0.8, random_share=0.3), "sum to at most 1"),
        (dict(boundary_offsets=3_000_000_000), "boundary_offsets is 3000000000"),
        (dict(boundary_weight=-1.0), "boundary_weight is -1.0"), (dict(short_rate=2.0), "short_rate is 2.0"),
    ],
)
def test_invalid_settings_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        SpanBoundary(**changes)


# Encoder (BertModel without pooler) and all parameters; 110M and 340M in the README of facebookresearch/SpanBERT.
@pytest.mark.parametrize(
    ("size", "encoder", "pretraining"),
    first_fast([("base", 107_719_680, 110_300_480), ("large", 332_529_664, 336_998_976)]),
)
def test_published_recipes(size, encoder, pretraining):
    experiment = load_preset(str(Path(__file__).parents[2] / "configs" / f"spanbert_{size}.py"))
    objective, o, t = experiment.objective, experiment.optimizer, experiment.train
    shapes = jax.eval_shape(objective.init, jax.random.key(0))
    counts = {name: sum(leaf.size for leaf in jax.tree.leaves(tree)) for name, tree in shapes.items()}
    assert counts["embeddings"] + counts["encoder"] == encoder and sum(counts.values()) == pretraining
    # facebookresearch/SpanBERT, pretraining/README.md: the command.
    assert (o.name, o.learning_rate, o.warmup_steps, o.schedule, o.eps) == ("adamw", 1e-4, 10_000, "linear", 1e-8)
    assert (o.b1, o.b2, o.weight_decay, o.clip_norm, o.bias_correction) == (0.9, 0.999, 0.01, 1.0, True)
    assert (t.steps, t.batch_size, experiment.data.length) == (2_400_000, 256, 512)
    assert (objective.span_success, objective.longest_span, objective.boundary_offsets) == (0.2, 10, 15)
    assert (objective.offset_size, objective.boundary_weight, objective.short_rate) == (200, 1.0, 0.0)
