"""What each model family is to a task: how a text is put before it, and which of its hidden states answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlm.errors import UserError
from jaxlm.models.albert import Albert
from jaxlm.models.bert import Bert
from jaxlm.models.distilbert import Distilbert
from jaxlm.models.electra import Electra, ElectraEncoder
from jaxlm.models.elmo import Elmo, scalar_mix
from jaxlm.models.encoder import Encoder, stack_flops
from jaxlm.models.gpt1 import Gpt1
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.layers.config import PlainActivation
from jaxlm.models.layers.dropout import dropout
from jaxlm.models.roberta import Roberta
from jaxlm.models.xlnet import UNKNOWN, Xlnet
from jaxlm.tokenizers.template import Template
from jaxlm.tokenizers.vocabulary import Vocabulary

Params = dict[str, Any]
INPUTS = ("input_ids", "token_type_ids", "attention_mask")
Inputs = dict[str, Array]
"""input_ids, token_type_ids, attention_mask int32 [batch, length]; padding stands at the end. For ELMo also the words'
characters, int32 [batch, length, characters]."""
Hidden = Callable[[Any, Params, Inputs, jax.Array | None], Float[Array, "batch length hidden"]]


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family that can be fine-tuned.

    template: what stands around a task's texts. hidden: (model, parameters, inputs, dropout key) → last hidden states.
    summary: the token whose hidden state stands for a text, or the mean of all. dense: activation of the dense layer
    between that and the classifier, as the class in Transformers has it; None without one. bias: whether its classifier
    of texts has a bias.
    is_decoder: whether it can also predict the next token.
    """

    template: Template
    hidden: Hidden
    summary: Literal["first", "last", "mean"] = "first"
    dense: PlainActivation | Literal["tanh"] | None = "tanh"
    bias: bool = True
    is_decoder: bool = False
    answer_template: Template | None = None
    """For answers in passages, where `template` puts no symbol behind the passage to stand for "no answer"."""


def _encoder(model: Encoder, params: Params, inputs: Inputs, key: jax.Array | None) -> jax.Array:
    return model.encode(params, inputs["input_ids"], inputs["token_type_ids"], inputs["attention_mask"], key)


def _xlnet(model: Xlnet, params: Params, inputs: Inputs, key: jax.Array | None) -> jax.Array:
    known = jnp.where(inputs["attention_mask"] > 0, 0, UNKNOWN)
    return model.encode(params, inputs["input_ids"], inputs["token_type_ids"], known, dropout_key=key).content


def _elmo(model: Elmo, params: Params, inputs: Inputs, key: jax.Array | None) -> jax.Array:
    sizes = jnp.sum(inputs["attention_mask"], axis=1)
    layers = model.encode(params, inputs["characters"], sizes)
    return dropout(scalar_mix(params["mix"]["weights"], params["mix"]["scale"], layers), model.dropout, key)


def _decoder(model: Gpt2, params: Params, inputs: Inputs, key: jax.Array | None) -> jax.Array:
    return model.decode_hidden(params, inputs["input_ids"], inputs["attention_mask"], key)


_GPT1 = Template(single="[START] $A [EXTRACT]", pair="[START] $A [DELIMITER] $B [EXTRACT]")
_GPT2 = Template(pair="$A eos $B", needs=("eos",))

FAMILIES: dict[type, Family] = {
    Bert: Family(Bert.template, _encoder),
    Roberta: Family(Roberta.template, _encoder),
    Albert: Family(Albert.template, _encoder),
    # Without segment types; a teacher that reads the same rows may have them.
    Distilbert: Family(
        dataclasses.replace(Distilbert.template, pair=Bert.template.pair), _encoder, dense="relu"
    ),
    ElectraEncoder: Family(ElectraEncoder.template, _encoder, dense="gelu"),
    Xlnet: Family(Xlnet.template, _xlnet, "last"),
    # Radford et al. 2018, section 3.3; the symbols' embeddings are new.
    Gpt1: Family(_GPT1, _decoder, "last", None, False, is_decoder=True),
    Gpt2: Family(
        _GPT2, _decoder, "last", None, False, is_decoder=True, answer_template=Template(pair="$A eos $B eos")
    ),
    # Peters et al. 2018, equation 1; the mean of the words' vectors stands for a text.
    Elmo: Family(_GPT2, _elmo, "mean", None, answer_template=Template(pair="$A eos $B eos")),
}


def family_of(model: Any) -> Family:
    """The family of a model, or of the class that it derives from. UserError where there is none."""
    for cls in type(model).__mro__:
        if cls in FAMILIES:
            return FAMILIES[cls]
    names = ", ".join(cls.__name__ for cls in FAMILIES)
    raise UserError(f"{type(model).__name__} cannot be fine-tuned for this task; choose a model of {names}.")


def model_of(objective: Any) -> Any:
    """The model of an objective that a task takes over: of ELECTRA the discriminator."""
    return objective.model.discriminator if isinstance(objective.model, Electra) else objective.model


def params_of(objective: Any, params: Params) -> Params:
    """The parameters of `model_of(objective)`."""
    return objective.model.discriminator_params(params) if isinstance(objective.model, Electra) else params


def at_last_token(
    hidden: Float[Array, "batch length hidden"], mask: Int[Array, "batch length"]
) -> Float[Array, "batch hidden"]:
    """The hidden state of the last token of each row."""
    place = jnp.maximum(jnp.sum(mask, axis=-1) - 1, 0)
    return jnp.take_along_axis(hidden, place[:, None, None], axis=1)[:, 0]


def summary(
    model: Any, params: Params, inputs: Inputs, dropout_key: jax.Array | None
) -> Float[Array, "batch hidden"]:
    """The hidden state that stands for each text."""
    family = family_of(model)
    if isinstance(model, Encoder):  # its last layer need be computed there only
        first = jnp.zeros((inputs["input_ids"].shape[0], 1), jnp.int32)
        arrays = (inputs[name] for name in INPUTS)
        return model.encode(params, *arrays, dropout_key, positions=first)[:, 0]
    hidden, mask = family.hidden(model, params, inputs, dropout_key), inputs["attention_mask"]
    if family.summary == "mean":
        return jnp.einsum("blh,bl->bh", hidden, mask.astype(hidden.dtype)) / jnp.maximum(
            jnp.sum(mask, axis=1, keepdims=True), 1
        )
    return at_last_token(hidden, mask)


def width(model: Any) -> int:
    """Width of the hidden states."""
    return 2 * model.hidden_size if isinstance(model, Elmo) else model.hidden_size


def forward_flops(model: Any, length: int) -> float:
    """FLOPs of one sequence's forward pass up to the last hidden states; a multiply-add counts as 2."""
    if isinstance(model, Elmo):
        return 2 * model.flops(length, 0) - model.word_flops(length)
    if isinstance(model, Xlnet):
        return model.flops(length, 0, 0)
    return model.flops(length, 0) if isinstance(model, Encoder) else stack_flops(model.stack, length)


def input_fill(vocabulary: Vocabulary) -> dict[str, int]:
    """What the inputs are filled up with."""
    return {"input_ids": max(vocabulary.pad, 0), "token_type_ids": 0, "attention_mask": 0}


def synthetic_inputs(shape: tuple[int, ...], vocabulary: Vocabulary) -> dict[str, np.ndarray]:
    """Full rows of random ids, and their numbers, for plans and benchmarks."""
    ids = np.random.default_rng(0).integers(0, vocabulary.size, shape, np.int32)
    rows = np.arange(shape[0], dtype=np.int32)
    return {"row": rows, "input_ids": ids, "token_type_ids": np.zeros_like(ids), "attention_mask": np.ones_like(ids)}


def inputs_of(row: Any) -> dict[str, np.ndarray]:
    """The arrays of a `Row` of a template as a model reads them."""
    return {
        "input_ids": row.input_ids, "token_type_ids": row.segments, "attention_mask": np.ones_like(row.input_ids),
    }
