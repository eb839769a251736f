"""Text embeddings from any trained model."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any, get_args

import jax
import numpy as np
from jaxtyping import Array, Float
from rich.console import Console
from rich.progress import track

from jaxlm.errors import UserError
from jaxlm.inference.generate import pad
from jaxlm.models.base import AtEnd, Inputs, Model, text_vectors
from jaxlm.objectives.base import Objective
from jaxlm.objectives.contrastive import InfoNCE
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.parallel.inference import num_row_shards, run_rows
from jaxlm.tokenizers.template import EncodedText
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params, Pooling, Role

BATCH = 32
"""Texts in a batch of a device."""


def embed(
    loaded: PretrainedModel, texts: Sequence[str], pooling: Pooling = "mean", length: int | None = None,
    normalize: bool = False, progress: bool = False, batch_size: int = BATCH, role: Role = "",
) -> Float[np.ndarray, "texts width"] | list[Float[np.ndarray, "tokens width"]]:
    """Return one float32 vector per text, pooled from its last hidden states, special tokens included.

    T5 uses its encoder, ELMo the mean of all layers ([forward, backward]), word2vec its word vectors. A model of late
    interaction has a vector per token, but for those of its skip list.

    Args:
        loaded: The trained model.
        texts: The texts.
        pooling: "cls" (the summary token, in XLNet and decoders the last), "mean" of all tokens, or "last" token.
        length: Maximum number of tokens, special tokens included; longer texts are truncated. None for the model's
            maximum, at most 512.
        normalize: Scale vectors to Euclidean length 1.
        progress: Show a progress bar if standard error is a terminal.
        batch_size: Texts in a batch of a device.
        role: Role of the texts in late interaction; "" means document.

    Raises:
        UserError: A text has no tokens, the length is below 3, or the model has no summary token.
    """
    objective, vocabulary = loaded.objective, loaded.tokenizer.vocabulary
    model, found = objective.model.text_model, objective.model.text_params(loaded.params)
    text_params = {name: leaf for name, leaf in found.items() if name not in model.output_params}  # as in exports
    length = 512 if length is None else length
    is_late = bool((trained := objective.vector_settings(None)) and trained.similarity == "maxsim")
    if is_late and role == "query":
        length = min(length, objective.query_length or length)
    if length < 3:
        raise UserError(f"the length of texts must be 3 or more, not {length}.")
    max_length = min(length, model.max_length or length)
    rows = _rows(loaded, texts, max_length)
    compute = functools.partial(_vectors, model, vocabulary, resolve_pooling(objective, pooling))
    if is_late:
        compute = functools.partial(_token_vectors, objective, is_query=role == "query")
    vectors: Any = [None] * len(rows)
    order = np.argsort([len(row.input_ids) for row in rows], kind="stable")
    shown = progress and sys.stderr.isatty()
    size = batch_size * num_row_shards(text_params)
    starts = range(0, len(order), size)
    for start in track(starts, "batches", console=Console(stderr=True), transient=True, disable=not shown):
        # Repeating rows in the last batch and rounding lengths up keeps the number of compilations small.
        chosen = order[start : start + size]
        filled = np.resize(chosen, min(size, len(order)))
        ids, mask = pad([rows[number].input_ids for number in filled], value=max(vocabulary.pad, 0))
        segments, _ = pad([rows[number].segments for number in filled])
        ids, segments, mask = (x[:, :max_length] for x in (ids, segments, mask.astype(np.int32)))
        found = run_rows(compute, text_params, Inputs(ids, segments, mask, padding=AtEnd()))
        if is_late:
            for number, vector in zip(filled, found, strict=True):
                vectors[number] = vector[np.any(vector, axis=1)]
            continue
        if start == 0:  # one array, since millions of vectors fill the memory
            vectors = np.empty((len(rows), found.shape[1]), found.dtype)
        if normalize:
            found = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
        vectors[filled] = found
    return vectors


def _rows(loaded: PretrainedModel, texts: Sequence[str], length: int) -> list[EncodedText]:
    """Return the rows of texts; raise UserError for a text without tokens."""
    template, vocabulary = loaded.objective.text_template, loaded.tokenizer.vocabulary
    room = length - template.num_symbols(False)
    rows = [template.build(vocabulary, ids[:room]) for ids in loaded.tokenizer.encode_arrays(texts)]
    if empty := [number for number, row in enumerate(rows) if not len(row.input_ids)]:
        raise UserError(f"text {empty[0] + 1} has no tokens; remove it.")
    return rows


def resolve_pooling(objective: Objective, pooling: Pooling) -> Pooling:
    """Return the pooling, with "cls" replaced by "last" for models whose summary token is the last one."""
    if pooling not in get_args(Pooling):
        raise UserError(f"there is no pooling {pooling!r}; choose {', '.join(get_args(Pooling))}.")
    if pooling != "cls":
        return pooling
    model = objective.model.text_model
    if model.vector_token == "mean":
        raise UserError(f"a {type(model).__name__} has no summary token; choose mean pooling.")
    return "last" if model.vector_token == "last" else "cls"


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _vectors(
    model: Model, vocabulary: Vocabulary, pooling: Pooling, params: Params, inputs: Inputs
) -> Float[Array, "batch width"]:
    return text_vectors(model, params, model.complete_inputs(inputs, vocabulary), pooling)


_token_vectors = jax.jit(InfoNCE.token_vectors, static_argnums=0, static_argnames="is_query")
