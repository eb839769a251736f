"""A model that is read from a run folder or a Transformers folder."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from jaxlm.parallel.hosts import log
from jaxlm.tokenizers.extension import Extension
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.vocabulary import SYMBOL_NAMES
from jaxlm.trees import with_mean_rows
from jaxlm.types import FolderSettings, Params

RESERVED = "<|reserved_special_token_0|>"
"""Token of Llama 3 without a use, which EuroBERT has as its mask."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["params"],
    meta_fields=["objective", "tokenizer", "fresh", "path", "step", "length", "settings"],
)
@dataclasses.dataclass(frozen=True)
class PretrainedModel:
    """A model from a run folder or a Transformers folder. As a pytree, its leaves are its parameters."""

    objective: Any
    """The bound objective that it was trained with; `objective.model` is its configuration."""
    params: Params
    """Nested dict of float32 arrays."""
    tokenizer: Tokenizer | None = None
    fresh: tuple[str, ...] = ()
    """Subtrees of parameters that were initialized and not trained, since the folder or, of an import that was written
    again, the first one lacks them, such as "mlm_head"."""
    path: str = ""
    """The folder that it was read from."""
    step: int = 0
    """Training step of the run's checkpoint."""
    length: int | None = None
    """Tokens of a row in the run's training, or of the longest text of a Transformers folder; None where it is open."""
    settings: FolderSettings = FolderSettings()
    """Further settings, those of its training and of the Transformers folder that it began from."""

    @property
    def vector_length(self) -> int:
        """Tokens of a text whose vector was not trained: a run's rows, of a stream 512, of a folder at most 512."""
        length = self.length or 512
        if not self.step:
            return min(length, 512)
        return 512 if self.objective.row_format(length).stride else length

    def in_direction(self, is_causal: bool) -> PretrainedModel:
        """Return the model with causal or with bidirectional attention, if it has both, and say what changes.

        Parameters stay. Special tokens stand around texts as in the other class. A decoder's tokenizer without a mask
        symbol gets one: a token that Llama 3 has in reserve, else [MASK], whose row is the mean of all.
        """
        own, tokenizer, sees = self.objective.model, self.tokenizer, "earlier" if is_causal else "all"
        model, is_same = own.in_direction(is_causal), own.is_causal == is_causal
        if model is None or (is_same and not own.template.is_default):
            return self
        if not is_same:
            # Texts of a decoder may be padded on the left; an encoder reads the first token.
            tokenizer = tokenizer.with_settings(single="", pair="", padding_side="right")
            log(f"The {type(own).__name__} of {self.path} goes on as a {type(model).__name__} that attends to {sees} "
                "tokens.")
        v, piece, mask = tokenizer.vocabulary, tokenizer.piece, SYMBOL_NAMES["mask"]
        if is_causal and v.eos < 0 <= v.sep:
            tokenizer = tokenizer.with_roles({"eos": piece(v.sep)})
        elif not is_causal and min(v.mask, v.cls) < 0 <= v.eos:
            roles = {} if v.cls >= 0 else {"cls": piece(v.eos if v.bos < 0 else v.bos), "sep": piece(v.eos)}
            mask = RESERVED if RESERVED in v.symbols else mask
            tokenizer = tokenizer.with_roles(roles if v.mask >= 0 else roles | {"mask": mask})
            if v.mask < 0:
                log(f"Its vocabulary has no mask symbol: {mask} becomes it, with the id {tokenizer.vocabulary.mask:,}.")
        found = dataclasses.replace(self, objective=dataclasses.replace(self.objective, model=model))
        if len(tokenizer) > v.size:
            return found.with_words(Extension(tokenizer, (tuple(range(v.size)),), (mask,)))
        return dataclasses.replace(found, tokenizer=tokenizer)

    def with_words(self, extension: Extension) -> PretrainedModel:
        """Return the model with the words of an extended vocabulary, each with the mean of its old pieces' rows.

        They take the rows without a token first. A table of a multiple of 64 rows grows to one; further rows are the
        mean of all, which is never likely: that of padding may be the end of a text.
        """
        model, old = self.objective.model, self.tokenizer.vocabulary
        new = dataclasses.replace(extension.tokenizer.vocabulary, preserve_rows=True)
        rows = new.rows(model.vocab_size, max(model.vocab_multiple, 1 if model.vocab_size % 64 else 64))
        every = tuple(range(old.size))
        unused = [(i,) if i < model.vocab_size else every for i in range(new.size, rows)]
        params = with_mean_rows(self.params, model.vocab_size, old.size, [*extension.pieces, *unused])
        larger = dataclasses.replace(self.objective, model=dataclasses.replace(model, vocab_size=rows), vocabulary=new)
        return dataclasses.replace(self, objective=larger, params=params, tokenizer=extension.tokenizer)
