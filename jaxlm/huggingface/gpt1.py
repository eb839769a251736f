"""GPT-1 in Transformers: OpenAIGPTLMHeadModel. Its layers are named like GPT-2's."""

from __future__ import annotations

from jaxlm.errors import UserError
from jaxlm.huggingface import gpt2
from jaxlm.huggingface.family import Family, Fields, Head, Source, TransformersModel
from jaxlm.huggingface.table import Table, embedding
from jaxlm.models.gpt1 import Gpt1
from jaxlm.objectives.causal_lm import CausalLM

FIELDS: Fields = gpt2.FIELDS | {"vocab_size": ("vocab_size", 40478), "max_positions": ("n_positions", 512)}
# "gelu" is the tanh approximation in their class.
ACTIVATIONS = {"gelu": "gelu_new", "gelu_new": "gelu_new", "relu": "relu", "silu": "silu", "swish": "silu"}


def table(num_layers: int) -> Table:
    """Return the table of OpenAIGPTLMHeadModel."""
    return Table(
        entries=(
            *embedding("embeddings/word", "transformer.tokens_embed"),
            *embedding("embeddings/position", "transformer.positions_embed"),
            *gpt2.layers("transformer.h.{layer}"),
        ),
        prefix="transformer.",
        ties={"lm_head.weight": "transformer.tokens_embed.weight"},
        # Causal masks, stored as buffers in older files, the published one too.
        ignored=("transformer.position_ids", *(f"transformer.h.{i}.attn.bias" for i in range(num_layers))),
    )


def models(objective: CausalLM) -> tuple[TransformersModel]:
    """Return the Transformers model that the objective's parameters fill."""
    m = objective.model
    if m.intermediate_size != 4 * m.hidden_size or m.activation == "gelu":
        raise UserError(
            "GPT-1's class in Transformers has a feed-forward layer four times as wide as the model, with relu, "
            "silu or the tanh approximation of gelu; other models cannot be exported."
        )
    config = {"model_type": "openai-gpt", "afn": "gelu" if m.activation == "gelu_new" else m.activation}
    return (gpt2.decoder(objective, "OpenAIGPTLMHeadModel", table(m.num_layers), config),)


def read_objective(source: Source) -> CausalLM:
    """Read causal language modelling with a GPT-1."""
    source.require(afn=tuple(ACTIVATIONS))
    fields = gpt2.read_decoder(source, FIELDS)
    activation = ACTIVATIONS[source.config.get("afn") or "gelu"]
    model = Gpt1(**fields, intermediate_size=4 * fields["hidden_size"], activation=activation)
    return CausalLM(model=model, plain_stream=gpt2.is_plain_stream(source))


FAMILY = Family("openai-gpt", models, read_objective, heads={
    "SequenceClassification": Head("OpenAIGPTForSequenceClassification", "score"),
})
