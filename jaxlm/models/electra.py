"""ELECTRA (Clark et al. 2020): a generator and a discriminator with shared embeddings."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax
from jaxtyping import Array, Float, Int

from jaxlm.fields import field
from jaxlm.models.base import FineTuning, Inputs, Model
from jaxlm.models.encoder import Encoder
from jaxlm.models.heads import Head, TwoLayerHead
from jaxlm.models.layers.config import TransformerConfig, check_heads, transformer_sizes
from jaxlm.types import Params

Network = Literal["generator", "discriminator"]

PUBLISHED = {"small": (12, 128, 256, 64), "small++": (12, 128, 256, 256), "base": (12, 768, 768, 256),
             "large": (24, 1024, 1024, 256)}
"""Size → number of layers, width of the embeddings, of the discriminator, of the generator."""


@dataclasses.dataclass(frozen=True)
class ElectraEncoder(Encoder):
    """Generator or discriminator: an encoder whose embeddings have their own width."""

    embedding_size: int = 768
    """Width of the embeddings, which a dense layer maps to hidden_size if the two differ."""

    head_activation = "gelu"

    @property
    def embedding_width(self) -> int:
        return self.embedding_size

    @property
    def fine_tuning(self) -> FineTuning:
        return FineTuning(self.template, activation="gelu", has_input_dropout=True)


@dataclasses.dataclass(frozen=True)
class NetworkPair(TransformerConfig, Model):
    """Base class of a generator and a discriminator for replaced-token detection.

    Parameters: `generator`, `discriminator` and `rtd_head`; a subclass says what the networks share. Fields without the
    prefix are the discriminator's.
    """

    max_positions: int = 512
    """Maximum sequence length (rows of the position embedding)."""
    init_std: float = field(0.02, range="[0, inf)")
    """Standard deviation of the truncated normal that initializes the weights."""
    last_layer_at_positions: bool = field(True, resumable=True)
    """Compute the generator's last layer only at the masked positions."""

    output_params = ("generator",)

    @property
    def discriminator(self) -> Encoder:
        """The discriminator without its head."""
        raise NotImplementedError

    @property
    def generator(self) -> Encoder:
        """The generator, with its masked-LM head."""
        raise NotImplementedError

    @property
    def replaced_head(self) -> Head:
        """The discriminator's head: one logit per token, positive for "replaced"."""
        return TwoLayerHead(self.discriminator.stack, 1)

    @property
    def text_model(self) -> Encoder:
        return self.discriminator

    def text_params(self, params: Params) -> Params:
        return self.discriminator_params(params)

    @property
    def fine_tuning(self) -> FineTuning:
        return self.text_model.fine_tuning

    def _hidden_states(self, params: Params, inputs: Inputs, key: jax.Array | None) -> jax.Array:
        """Return the discriminator's last hidden states."""
        return self.discriminator.hidden_states(self.discriminator_params(params), inputs, key=key)

    def token_logits(
        self, params: Params, inputs: Inputs, at: Int[Array, "batch selected"]
    ) -> Float[Array, "batch selected vocab"]:
        """Return the generator's vocabulary logits of masked tokens, float32, without dropout."""
        return self.generator.token_logits(self.generator_params(params), inputs, at)

    def init(self, key: jax.Array) -> Params:
        """Return fresh parameters of both networks, float32, each with its own embeddings."""
        key_generator, key_discriminator, key_head = jax.random.split(key, 3)
        generator, discriminator = self.generator.init(key_generator), self.discriminator.init(key_discriminator)
        del discriminator["mlm_head"]
        return {
            "generator": generator, "discriminator": discriminator, "rtd_head": self.replaced_head.init_params(key_head)
        }

    def generator_params(self, params: Params) -> Params:
        """Return the parameters of `generator`."""
        return params["generator"]

    def discriminator_params(self, params: Params) -> Params:
        """Return the parameters of `discriminator`."""
        return params["discriminator"]

    def forward_flops(self, length: int, predicted: int = 0) -> float:
        """Return the FLOPs of one sequence's forward pass through both networks.

        The generator's head counts at `predicted` positions, the discriminator's at all.
        """
        d, h = self.discriminator, self.hidden_size
        return self.generator.forward_flops(length, predicted) + d.forward_flops(length) + 2.0 * length * (h * h + h)


@dataclasses.dataclass(frozen=True)
class Electra(NetworkPair):
    """Discriminator and generator. The defaults are ELECTRA-base; fields without the prefix are the discriminator's.

    Parameters: `embeddings`, `generator/{projection,encoder,mlm_head}`, `discriminator/{projection,encoder}` and
    `rtd_head`; without shared embeddings, those of the generator are `generator/embeddings`.
    """

    embedding_size: int = 768
    """Width of the embeddings of both networks, which a dense layer maps to the width of the network."""
    generator_hidden_size: int = 256
    """Width of the generator's residual stream; a quarter to a half of the discriminator's works best."""
    generator_num_layers: int = 12
    """Number of layers of the generator."""
    generator_num_heads: int = 4
    """Number of attention heads of the generator; must divide generator_hidden_size."""
    generator_intermediate_size: int = 1024
    """Width of the generator's feed-forward layers."""
    share_embeddings: bool = True
    """Share the embeddings (words, positions, segment types and their LayerNorm) between the networks."""
    type_vocab_size: int = 2
    """Number of segment types."""

    published_sizes: ClassVar = {
        size: transformer_sizes(layers, width) | dict(
            embedding_size=embedding, generator_num_layers=layers, generator_hidden_size=generator,
            generator_num_heads=generator // 64, generator_intermediate_size=4 * generator,
        )
        for size, (layers, embedding, width, generator) in PUBLISHED.items()
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self.generator_hidden_size, self.generator_num_heads, "generator_")

    @property
    def discriminator(self) -> ElectraEncoder:
        return self._network("")

    @property
    def generator(self) -> ElectraEncoder:
        return self._network("generator_")

    def _network(self, prefix: str) -> ElectraEncoder:
        sizes = ("hidden_size", "num_layers", "num_heads", "intermediate_size")
        names = [item.name for item in dataclasses.fields(ElectraEncoder)]
        return ElectraEncoder(**{name: getattr(self, prefix + name if name in sizes else name) for name in names})

    def init(self, key: jax.Array) -> Params:
        """Return fresh parameters of both networks, float32."""
        params = super().init(key)
        if self.share_embeddings:
            del params["generator"]["embeddings"]
        return {"embeddings": params["discriminator"].pop("embeddings")} | params

    def generator_params(self, params: Params) -> Params:
        return {"embeddings": params["embeddings"]} | params["generator"]

    def discriminator_params(self, params: Params) -> Params:
        return {"embeddings": params["embeddings"]} | params["discriminator"]
