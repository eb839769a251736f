"""ELMo (Peters et al. 2018): word vectors from characters, and an LSTM language model in each direction."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlm.fields import field
from jaxlm.models.base import FineTuning, Inputs, Model
from jaxlm.models.layers.config import HasDtype, check_sizes
from jaxlm.models.layers.dense import add_bias, dense_product
from jaxlm.models.layers.dropout import dropout
from jaxlm.models.layers.lstm import LstmState, init_lstm, run_lstm
from jaxlm.tokenizers.template import Template
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params

FILTERS = (32, 32, 64, 128, 256, 512, 1024)
"""Number of convolution filters over 1, 2, … characters."""
WORD_LENGTH = 50
"""Characters of a word, with the symbols at its beginning and end."""
BEGIN_TEXT, END_TEXT, BEGIN_WORD, END_WORD, PAD_WORD, NUM_CHARACTERS = 256, 257, 258, 259, 260, 261
"""Character ids after those of the bytes 0 to 255, and the number of all ids."""


_SYMBOLS = np.full((2, WORD_LENGTH), PAD_WORD, np.int32)
"""Characters of the symbols <s> and </s>."""
_SYMBOLS[:, :3] = [[BEGIN_WORD, BEGIN_TEXT, END_WORD], [BEGIN_WORD, END_TEXT, END_WORD]]


@functools.lru_cache(maxsize=2)
def spell(vocabulary: Vocabulary) -> Int[np.ndarray, "vocab characters"]:
    """Return the characters of every word: its UTF-8 bytes between BEGIN_WORD and END_WORD, cut to WORD_LENGTH."""
    pieces = vocabulary.pieces or [f"w{number}" for number in range(vocabulary.size)]
    table = np.full((vocabulary.size, WORD_LENGTH), PAD_WORD, np.int32)
    for number, piece in enumerate(pieces):
        spelt = list(piece.encode("utf-8", "replace")[: WORD_LENGTH - 2])
        table[number, : len(spelt) + 2] = [BEGIN_WORD, *spelt, END_WORD]
    for number, symbol in zip((vocabulary.bos, vocabulary.eos), _SYMBOLS, strict=True):
        if number >= 0:
            table[number] = symbol
    return table


@dataclasses.dataclass(frozen=True)
class Elmo(HasDtype, Model):
    """ELMo. The defaults are the original size.

    Words outside the vocabulary have the characters of "[UNK]"; in the original code they have their own.

    Parameters: `characters`, `filters/i`, `highways/i/{carry,transform}`, `token_projection`; for each LSTM `forward/i`
    and `backward/i` (see `layers.lstm`); `softmax`, which both directions share.
    """

    vocab_size: int = field(793_471, vocabulary=True)
    """Vocabulary size (words of the softmax); a run takes it from its tokenizer."""
    hidden_size: int = 512
    """Width of the word vectors, and of each direction's hidden states."""
    cell_size: int = 4096
    """Number of cells of an LSTM."""
    num_layers: int = 2
    """Number of LSTMs in each direction; all but the first have a residual connection."""
    num_highways: int = field(2, range="[0, inf)")
    """Number of highway layers of the word vectors."""
    character_size: int = 16
    """Width of the character embedding."""
    filter_widths: int = field(7, range="[1, 7]")
    """Largest width of the convolutions in characters. Widths 1 to 7 have 32, 32, 64, 128, 256, 512 and 1,024 filters.
    """
    clip: float = field(3.0, range="[0, inf)")
    """Limit of the absolute values of cells and projected states; 0 for none."""
    dropout: float = field(0.1, recipe=True, range="[0, 1)")
    """Dropout rate of the input of each LSTM and of the output of the last."""
    task_layers: Literal["mix", "top"] = field("mix", recipe=True)
    """What tasks read: the learnt mix of all layers (Peters et al. 2018, equation 1), or the top layer alone."""

    summary_token = "mean"
    input_params = ()
    output_params = ("softmax",)
    published_sizes: ClassVar = {
        "original": dict(num_highways=2, cell_size=4096, hidden_size=512),
        "medium": dict(num_highways=1, cell_size=2048, hidden_size=256),
        "small": dict(num_highways=1, cell_size=1024, hidden_size=128),
    }

    def __post_init__(self) -> None:
        check_sizes(self)

    @property
    def width(self) -> int:
        return 2 * self.hidden_size

    @property
    def fine_tuning(self) -> FineTuning:
        template = Template(pair="$A eos $B", needs=("eos",))
        return FineTuning(template, Template(pair="$A eos $B eos"), activation=None)

    @property
    def num_filters(self) -> int:
        """Number of convolution filters, the width of a word before the projection."""
        return sum(FILTERS[: self.filter_widths])

    def init(self, key: jax.Array) -> Params:
        """Return fresh parameters, float32, with the distributions of the official code."""
        keys = iter(jax.random.split(key, 16 + 2 * self.num_highways + 2 * self.num_layers))
        features, h = self.num_filters, self.hidden_size

        def uniform(limit: float, *shape: int) -> jax.Array:
            return jax.random.uniform(next(keys), shape, jnp.float32, -limit, limit)

        def dense(inputs: int, outputs: int, bias: float = 0.0) -> Params:
            kernel = jax.random.normal(next(keys), (inputs, outputs)) * inputs**-0.5
            return {"kernel": kernel, "bias": jnp.full(outputs, bias, jnp.float32)}

        return {
            "characters": {"embedding": uniform(1.0, NUM_CHARACTERS, self.character_size)},
            "filters": {
                str(i): {"kernel": uniform(0.05, i + 1, self.character_size, count), "bias": jnp.zeros(count)}
                for i, count in enumerate(FILTERS[: self.filter_widths])
            },
            "highways": {
                str(i): {"carry": dense(features, features, -2.0), "transform": dense(features, features)}
                for i in range(self.num_highways)
            },
            "token_projection": dense(features, h),
            **{
                direction: {str(i): init_lstm(next(keys), h, self.cell_size, h) for i in range(self.num_layers)}
                for direction in ("forward", "backward")
            },
            "softmax": {
                "embedding": jax.random.normal(next(keys), (self.vocab_size, h)) * h**-0.5,
                "bias": jnp.zeros(self.vocab_size),
            },
        }

    def word_vectors(
        self, params: Params, characters: Int[Array, "*batch characters"]
    ) -> Float[Array, "*batch hidden"]:
        """Return word vectors: convolutions, maximum over characters, ReLU, highway layers, projection.

        Highway layers: Srivastava et al. 2015.
        """
        x = params["characters"]["embedding"][characters].astype(self.dtype)
        shape = x.shape[:-2]
        x = x.reshape(-1, *x.shape[-2:])
        features = []
        for layer in params["filters"].values():
            y = jax.lax.conv_general_dilated(
                x, layer["kernel"].astype(x.dtype), (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
            )
            features.append(jax.nn.relu(add_bias(jnp.max(y, axis=1), layer["bias"])))
        x = jnp.concatenate(features, axis=-1)

        def dense(layer: Params, x: jax.Array) -> jax.Array:
            return add_bias(dense_product(x, layer["kernel"].astype(x.dtype)), layer["bias"])

        for layer in params["highways"].values():
            carry = jax.nn.sigmoid(dense(layer["carry"], x))
            x = carry * jax.nn.relu(dense(layer["transform"], x)) + (1.0 - carry) * x
        return dense(params["token_projection"], x).reshape(*shape, self.hidden_size)

    def initial_memory(self, rows: int) -> tuple[LstmState, ...]:
        """Return the initial state of one direction's LSTMs: zeros."""
        return tuple(
            LstmState(jnp.zeros((rows, self.cell_size)), jnp.zeros((rows, self.hidden_size), self.dtype))
            for _ in range(self.num_layers)
        )

    def run(
        self, params: Params, x: Float[Array, "batch length hidden"], state: tuple[LstmState, ...],
        dropout_key: jax.Array | None = None,
    ) -> tuple[list[Float[Array, "batch length hidden"]], tuple[LstmState, ...]]:
        """Run the LSTMs of one direction.

        Returns:
            The hidden states of each LSTM, and the states after the last token.
        """
        layers, after, count = [], [], self.num_layers + 1
        keys = [None] * count if dropout_key is None else jax.random.split(dropout_key, count)
        for i in range(self.num_layers):
            x = dropout(x, self.dropout, keys[i])
            y, new = run_lstm(params[str(i)], x, state[i], self.clip)
            x = x + y if i else y
            layers.append(x)
            after.append(new)
        layers[-1] = dropout(x, self.dropout, keys[-1])
        return layers, tuple(after)

    def layers(
        self, params: Params, characters: Int[Array, "batch length characters"], lengths: Int[Array, " batch"]
    ) -> Float[Array, "layers batch length both"]:
        """Return the layers of the scalar mix: [words, words], then [forward, backward] of each LSTM.

        Each row is one text of `lengths` words. As in training, the forward LSTMs read <s> before it and the backward
        ones </s> after it, and likewise where an </s> separates two texts.
        """
        rows, length = characters.shape[:2]
        position = jnp.arange(length)
        reverse = jnp.where(position < lengths[:, None], lengths[:, None] - 1 - position, position)[..., None]
        words, symbols = self.word_vectors(params, characters), self.word_vectors(params, jnp.asarray(_SYMBOLS))

        def read(direction: str, symbol: jax.Array, words: jax.Array) -> list[jax.Array]:
            words = jnp.concatenate([jnp.broadcast_to(symbol, (rows, 1, self.hidden_size)), words], axis=1)
            layers, _ = self.run(params[direction], words, self.initial_memory(rows))
            return [layer[:, 1:] for layer in layers]

        forward = read("forward", symbols[0], jnp.where(characters[..., 1:2] == END_TEXT, symbols[0], words))
        backward = read("backward", symbols[1], jnp.take_along_axis(words, reverse, axis=1))
        backward = [jnp.take_along_axis(layer, reverse, axis=1) for layer in backward]
        pairs = [(words, words), *zip(forward, backward, strict=True)]
        return jnp.stack([jnp.concatenate(pair, axis=-1) for pair in pairs])

    def init_task(self, key: jax.Array) -> Params:
        return super().init_task(key) | {"mix": self._equal_mix}

    @property
    def _equal_mix(self) -> Params:
        """Initial parameters of the scalar mix: equal weights."""
        return {"weights": jnp.zeros(self.num_layers + 1), "scale": jnp.ones(())}

    def complete_inputs(self, inputs: Inputs, vocabulary: Vocabulary) -> Inputs:
        characters = jnp.asarray(spell(vocabulary))[inputs.ids]
        return super().complete_inputs(inputs, vocabulary)._replace(characters=characters)

    def _hidden_states(self, params: Params, inputs: Inputs, key: jax.Array | None) -> jax.Array:
        """Return the scalar mix of the layers with the weights `params["mix"]`, or their mean without such weights."""
        mask = jnp.ones_like(inputs.ids) if inputs.mask is None else inputs.mask
        mix = params.get("mix", self._equal_mix)
        layers = self.layers(params, inputs.characters, jnp.sum(mask, axis=1))
        if self.task_layers == "top":
            return dropout(layers[-1], self.dropout, key)
        return dropout(scalar_mix(mix["weights"], mix["scale"], layers), self.dropout, key)

    def direction_flops(self, length: int, predicted: int) -> float:
        """Return the FLOPs of one sequence through one direction, with `predicted` words in the softmax."""
        h, cells = self.hidden_size, self.cell_size
        lstm = 2 * h * 4 * cells + cells * h
        return self.word_flops(length) + 2.0 * length * (self.num_layers * lstm + h * predicted)

    def forward_flops(self, length: int, predicted: int = 0) -> float:
        """Return the FLOPs of both directions over the same word vectors."""
        return 2 * self.direction_flops(length, predicted) - self.word_flops(length)

    def word_flops(self, length: int) -> float:
        """Return the FLOPs of the word vectors."""
        features = self.num_filters
        filters = sum(
            (WORD_LENGTH - i) * (i + 1) * self.character_size * count
            for i, count in enumerate(FILTERS[: self.filter_widths])
        )
        return 2.0 * length * (filters + self.num_highways * 2 * features**2 + features * self.hidden_size)


def scalar_mix(
    weights: Float[Array, " layers"], scale: Float[Array, ""], layers: Float[Array, "layers batch length both"]
) -> Float[Array, "batch length both"]:
    """Return scale · Σ softmax(weights) · layer (Peters et al. 2018, equation 1)."""
    return scale * jnp.einsum("l,l...->...", jax.nn.softmax(weights), layers)
