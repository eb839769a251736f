"""XLM-R (Conneau et al. 2020)."""

from __future__ import annotations

import dataclasses

from jaxlm.fields import field
from jaxlm.models.roberta import Roberta


@dataclasses.dataclass(frozen=True)
class XlmRoberta(Roberta):
    """RoBERTa encoder for 100 languages. The defaults are xlm-roberta-base."""

    vocab_size: int = field(250002, vocabulary=True)
    """Vocabulary size (rows of the word embedding); a run takes it from its tokenizer."""
