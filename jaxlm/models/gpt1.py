"""GPT-1 (Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training")."""

from __future__ import annotations

import dataclasses

from jaxlm.fields import field
from jaxlm.models.base import FineTuning
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.layers.config import StackConfig
from jaxlm.tokenizers.template import Template


@dataclasses.dataclass(frozen=True)
class Gpt1(Gpt2):
    """GPT-1 decoder: GPT-2 with post-norm layers and no final norm. The defaults are the published model.

    Dropout of the embeddings applies to their sum, as in Transformers; the released code applies it to the embedding
    matrix.
    """

    vocab_size: int = field(40478, vocabulary=True)
    """Vocabulary size (rows of the word embedding); a run takes it from its tokenizer."""
    max_positions: int = 512
    """Maximum sequence length (rows of the position embedding)."""
    dropout: float = field(0.1, recipe=True, range="[0, 1)")
    """Dropout rate of the embeddings, the attention output and the feed-forward output."""
    attention_dropout: float = field(0.1, recipe=True, range="[0, 1)")
    """Dropout rate of attention probabilities. Above 0, only the TPU's kernel for short rows in bfloat16 is fused."""
    position_init_std: float = 0.02
    """Standard deviation of the normal that initializes the position embedding."""
    residual_init_scale: float | None = 1.0
    """Factor on init_std for matrices that write to the residual stream."""

    template = Template()

    @property
    def fine_tuning(self) -> FineTuning:
        # Radford et al. 2018, section 3.3. A task adds these symbols to the vocabulary.
        template = Template(single="[START] $A [EXTRACT]", pair="[START] $A [DELIMITER] $B [EXTRACT]")
        return FineTuning(template, activation=None, use_bias=False)

    @property
    def stack(self) -> StackConfig:
        return dataclasses.replace(super().stack, norm_placement="post", final_norm=False)
