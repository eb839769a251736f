"""ELECTRA (Clark et al. 2020): two encoders over one embedding module, a generator and a discriminator."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Self

import jax
from jaxtyping import Array, Float, Int

from jaxlm.fields import field
from jaxlm.models.base import FineTuning, Inputs, Model
from jaxlm.models.encoder import Encoder
from jaxlm.models.heads import TwoLayerHead
from jaxlm.models.layers.config import ExecutionConfig, PlainActivation, check_heads, check_sizes
from jaxlm.types import Params

Network = Literal["generator", "discriminator"]

PUBLISHED = {"small": (12, 128, 256, 64), "small++": (12, 128, 256, 256), "base": (12, 768, 768, 256),
             "large": (24, 1024, 1024, 256)}
"""Size → layers, width of the embeddings, of the discriminator, of the generator."""


@dataclasses.dataclass(frozen=True)
class ElectraEncoder(Encoder):
    """One of the two networks: an encoder whose embeddings have a width of their own."""

    embedding_size: int = 768
    """Width of the embeddings, which both networks share; a projection follows where hidden_size differs."""

    @property
    def embedding_width(self) -> int:
        return self.embedding_size

    @property
    def head_activation(self) -> PlainActivation:
        return "gelu"

    @property
    def fine_tuning(self) -> FineTuning:
        return FineTuning(self.template, activation="gelu")


@dataclasses.dataclass(frozen=True)
class Electra(ExecutionConfig, Model):
    """A discriminator and its generator. The defaults are ELECTRA-base.

    Parameters: `embeddings`, `generator/{projection,encoder,mlm_head}`, `discriminator/{projection,encoder}` and
    `rtd_head`; without shared embeddings the generator's are `generator/embeddings`.
    """

    vocab_size: int = 30522
    """Rows of the word embedding; a run sets it from its tokenizer."""
    embedding_size: int = 768
    """Width of the embeddings, which both networks share; each projects them where its own width differs."""
    hidden_size: int = 768
    """Width of the discriminator's residual stream."""
    num_layers: int = 12
    """The discriminator's layers."""
    num_heads: int = 12
    """The discriminator's attention heads; must divide hidden_size."""
    intermediate_size: int = 3072
    """Width of the discriminator's feed-forward layer."""
    generator_hidden_size: int = 256
    """Width of the generator's residual stream; a quarter to a half of the discriminator's works best."""
    generator_num_layers: int = 12
    """The generator's layers."""
    generator_num_heads: int = 4
    """The generator's attention heads; must divide generator_hidden_size."""
    generator_intermediate_size: int = 1024
    """Width of the generator's feed-forward layer."""
    share_embeddings: bool = True
    """One embedding module (words, positions, segments and their LayerNorm) for both networks, or one for each."""
    max_positions: int = 512
    """Learned positions: the longest sequence."""
    type_vocab_size: int = 2
    """Segment types."""
    activation: PlainActivation = "gelu"
    """gelu is the exact (erf) form, gelu_new the tanh approximation; the generator's head always uses gelu."""
    dropout: float = field(0.1, recipe=True)
    """Dropout after the embeddings, the attention output and the feed-forward output."""
    attention_dropout: float = field(0.1, recipe=True)
    """Dropout on attention probabilities; above 0 it rules out fused attention kernels while training."""
    norm_eps: float = 1e-12
    """Epsilon of LayerNorm."""
    init_std: float = 0.02
    """Standard deviation of the truncated normal that weights are initialized from."""
    last_layer_at_positions: bool = field(True, resumable=True)
    """Compute the generator's last layer only at the positions that it predicts."""

    output_params = ("generator",)

    def __post_init__(self) -> None:
        check_sizes(self)
        check_heads(self.hidden_size, self.num_heads)
        check_heads(self.generator_hidden_size, self.generator_num_heads, "generator_")

    @classmethod
    def published(cls, size: str, **changes: Any) -> Self:
        """A published size by name: small, small++ (its generator has full size), base or large (all uncased)."""
        layers, embedding, hidden, generator = PUBLISHED[size]
        shape = dict(
            embedding_size=embedding, num_layers=layers, hidden_size=hidden, num_heads=hidden // 64,
            intermediate_size=4 * hidden, generator_num_layers=layers, generator_hidden_size=generator,
            generator_num_heads=generator // 64, generator_intermediate_size=4 * generator,
        )
        return cls(**(shape | changes))

    @property
    def discriminator(self) -> ElectraEncoder:
        """The discriminator without its head."""
        return self._network("")

    @property
    def generator(self) -> ElectraEncoder:
        """The generator, with its masked-LM head."""
        return self._network("generator_")

    def _network(self, prefix: str) -> ElectraEncoder:
        sizes = {name: getattr(self, prefix + name)
                 for name in ("hidden_size", "num_layers", "num_heads", "intermediate_size")}
        names = {f.name for f in dataclasses.fields(ElectraEncoder)} - set(sizes)
        return ElectraEncoder(**sizes, **{name: getattr(self, name) for name in names})

    @property
    def replaced_head(self) -> TwoLayerHead:
        """The discriminator's head: one logit a token, above 0 where it takes the token for a replacement."""
        return TwoLayerHead(self.discriminator.stack, 1)

    @property
    def text_model(self) -> ElectraEncoder:
        return self.discriminator

    def text_params(self, params: Params) -> Params:
        return self.discriminator_params(params)

    @property
    def width(self) -> int:
        return self.text_model.width

    @property
    def fine_tuning(self) -> FineTuning:
        return self.text_model.fine_tuning

    def hidden_states(
        self, params: Params, inputs: Inputs, *, key: jax.Array | None = None,
        at: Int[Array, "batch selected"] | None = None,
    ) -> Float[Array, "batch length_or_selected hidden"]:
        """Return the discriminator's last hidden states."""
        return self.discriminator.hidden_states(self.discriminator_params(params), inputs, key=key, at=at)

    def token_logits(
        self, params: Params, inputs: Inputs, at: Int[Array, "batch selected"]
    ) -> Float[Array, "batch selected vocab"]:
        """Return the generator's vocabulary logits of masked tokens, float32, without dropout."""
        return self.generator.token_logits(self.generator_params(params), inputs, at)

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters of both networks, float32."""
        key_generator, key_discriminator, key_head = jax.random.split(key, 3)
        generator, discriminator = self.generator.init(key_generator), self.discriminator.init(key_discriminator)
        del discriminator["mlm_head"]
        embeddings = discriminator.pop("embeddings")
        if self.share_embeddings:
            del generator["embeddings"]
        return {
            "embeddings": embeddings, "generator": generator, "discriminator": discriminator,
            "rtd_head": self.replaced_head.init(key_head),
        }

    def generator_params(self, params: Params) -> Params:
        """The generator's parameters, as `self.generator` takes them."""
        return {"embeddings": params["embeddings"]} | params["generator"]

    def discriminator_params(self, params: Params) -> Params:
        """The discriminator's parameters, as `self.discriminator` takes them."""
        return {"embeddings": params["embeddings"]} | params["discriminator"]

    def forward_flops(self, length: int, predicted: int = 0) -> float:
        """Return the FLOPs of one sequence's forward pass through both networks, `predicted` positions in the
        generator's head and all in the discriminator's."""
        d, h = self.discriminator, self.hidden_size
        return self.generator.forward_flops(length, predicted) + d.forward_flops(length) + 2.0 * length * (h * h + h)
