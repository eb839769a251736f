"""Masked diffusion exported as BertForMaskedLM and ModernBertForMaskedLM: its bound, recomputed in PyTorch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.inference.fill_mask import fill_mask
from jaxlm.models.bert import Bert
from jaxlm.models.modernbert import ModernBert
from jaxlm.objectives.masked_diffusion import EVAL_DRAWS, MaskedDiffusion
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.types import TokenBatch
from tests.params import first_fast, random_params

LENGTH = 40
SIZES = dict(hidden_size=32, num_heads=4, intermediate_size=48, max_positions=LENGTH, dropout=0.0)
OBJECTIVES = {
    "BertForMaskedLM": MaskedDiffusion(model=Bert(num_layers=2, attention_dropout=0.0, **SIZES)),
    "ModernBertForMaskedLM": MaskedDiffusion(
        model=ModernBert(num_layers=3, local_attention=8, **SIZES), schedule="llada"
    ),
}


@pytest.fixture(scope="module", params=first_fast(OBJECTIVES))
def exported(request, tokenizer, tmp_path_factory):
    """An objective with random parameters, and its folder."""
    objective = OBJECTIVES[request.param].bind(tokenizer.vocabulary, LENGTH)
    params = jax.tree.map(jnp.asarray, objective.merge_pretrained(random_params(objective, 1), None))
    out = export_folder(tmp_path_factory.mktemp("diffusion") / "out", objective, params, tokenizer, ModelCard())
    return objective, params, out, request.param


def text(size: int) -> TokenBatch:
    """Rows of one to three documents, with room for their symbols; one row is empty."""
    rng = np.random.default_rng(0)
    width = LENGTH - 2
    real = np.arange(width) < np.array([30, 20, 7, 0, 32, 1])[:, None]
    documents = 1 + (np.arange(width) >= 5).astype(int) + (np.arange(width) >= 17)
    tokens = np.where(real, rng.integers(5, size, real.shape), 0)
    return TokenBatch(tokens.astype(np.int32), np.where(real, documents, 0).astype(np.int32))


def slow_sum(model: torch.nn.Module, ids, masked, documents, weights, mask: int) -> float:
    """Return Σ weight · -log p(id) of a row, one unpadded document at a time; [MASK] has the logit -inf."""
    total = 0.0
    for number in range(1, documents.max() + 1):
        at = documents == number
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(masked[at][None].astype(np.int64))).logits[0].double()
        logits[:, mask] = -torch.inf
        nll = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[at].astype(np.int64)), reduction="none")
        total += float((nll.numpy() * weights[at])[weights[at] > 0].sum())
    return total


@pytest.mark.slow
def test_the_bound_is_that_of_the_exported_class(exported):
    objective, params, out, name = exported
    v = objective.vocabulary
    model, report = transformers.AutoModelForMaskedLM.from_pretrained(out, output_loading_info=True)
    assert type(model).__name__ == name
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    model.eval()
    batch = text(v.size)
    example = jax.device_get(jax.jit(objective.corrupt)(jax.random.key(3), batch))
    loss = jax.jit(objective.loss, static_argnames="train")
    trained, evaluated = (
        loss(params, example, jax.random.key(0), train=train)["diffusion_loss"] for train in (True, False)
    )
    documents, ids = example["documents"], example["masked_labels"]
    is_text = (documents > 0) & ~np.isin(ids, [v.cls, v.sep])
    assert documents.max() == 3
    assert trained.weight == evaluated.weight == is_text.sum() == (batch.segment_ids > 0).sum() == 90
    rows = range(len(ids))
    masked, weights = example["input_ids"], example["masked_weights"]
    expected = sum(slow_sum(model, ids[i], masked[i], documents[i], weights[i], v.mask) for i in rows)
    assert float(trained.total) == pytest.approx(expected, rel=1e-5)
    expected = 0.0
    for i in rows:
        places = np.flatnonzero(is_text[i])
        for draw in range(EVAL_DRAWS) if len(places) else ():
            k = 1 + int((example["time"][i] + draw / EVAL_DRAWS) % 1 * len(places))
            chosen = sorted(places, key=lambda place: example["noise"][i, draw, place])[:k]
            weights = np.zeros(LENGTH)
            weights[chosen] = len(places) / k
            masked = np.where(weights > 0, v.mask, ids[i])
            expected += slow_sum(model, ids[i], masked, documents[i], weights, v.mask) / EVAL_DRAWS
    assert float(evaluated.total) == pytest.approx(expected, rel=1e-5)


def test_the_exported_class_fills_masks_and_never_with_a_mask(exported, tokenizer):
    objective, params, out, _ = exported
    answers = fill_mask(PretrainedModel(objective, params, tokenizer), ["the [MASK] sat"], len(tokenizer))[0][0]
    assert dict(answers)["[MASK]"] < 1e-30
    library = transformers.pipeline("fill-mask", model=str(out), tokenizer=str(out), top_k=3)("the [MASK] sat")
    np.testing.assert_allclose([p for _, p in answers[:3]], [entry["score"] for entry in library], atol=1e-5)


def test_an_import_initializes_another_run(exported):
    """The folder is imported as masked language modelling, whose weights masked diffusion takes over."""
    _, params, out, name = exported
    imported = import_folder(out)
    own = OBJECTIVES[name].with_pretrained_model(imported).bind(imported.tokenizer.vocabulary, LENGTH)
    begun = own.merge_pretrained(random_params(own, 2), imported)
    jax.tree.map(np.testing.assert_array_equal, begun, params)
