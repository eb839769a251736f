"""The Reformer in Transformers: ReformerModelWithLMHead."""

from __future__ import annotations

import dataclasses

from jaxlm.errors import UserError
from jaxlm.huggingface.family import Family, Fields, Source, TransformersModel, to_config
from jaxlm.huggingface.gpt2 import is_plain_stream, special_token_ids
from jaxlm.huggingface.table import Entry, Table, dense, embedding, norm
from jaxlm.models.reformer import Reformer
from jaxlm.objectives.causal_lm import CausalLM

FIELDS: Fields = {
    "vocab_size": ("vocab_size", 320),
    "hidden_size": ("hidden_size", 256),
    "num_heads": ("num_attention_heads", 12),
    "head_dim": ("attention_head_size", 64),
    "intermediate_size": ("feed_forward_size", 512),
    "local_chunk_size": ("local_attn_chunk_length", 64),
    "lsh_chunk_size": ("lsh_attn_chunk_length", 64),
    "num_hashes": ("num_hashes", 1),
    # With the seed Transformers draws the same rotations as here, each time.
    "hash_seed": ("hash_seed", 0),
    "activation": ("hidden_act", "relu"),
    "dropout": ("hidden_dropout_prob", 0.05),
    "attention_dropout": ("local_attention_probs_dropout_prob", 0.05),
    "lsh_attention_dropout": ("lsh_attention_probs_dropout_prob", 0.0),
    "norm_eps": ("layer_norm_eps", 1e-12),
    "init_std": ("initializer_range", 0.02),
    "position_init_std": ("axial_norm_std", 1.0),
}
FIXED = {"is_decoder": True, "axial_pos_embds": True, "tie_word_embeddings": False}
PROJECTIONS = {"local": {"query": "query", "key": "key", "value": "value"},
               "lsh": {"query": "query_key", "value": "value"}}
BUFFERS = ("mask_value_float16", "mask_value_float32", "self_mask_value_float16", "self_mask_value_float32")


def layer_types(model: Reformer) -> list[str]:
    """Return the attention type of each layer."""
    return [model.attention_types[i % len(model.attention_types)] for i in range(model.num_layers)]


def table(model: Reformer) -> Table:
    """Return the table of ReformerModelWithLMHead.

    Its grid of positions is stored as [rows, 1, width] and [1, columns, width].
    """
    (rows, columns), widths = model.axial_shape, model.axial_widths
    positions = "reformer.embeddings.position_embeddings.weights"
    entries = [
        *embedding("word", "reformer.embeddings.word_embeddings"),
        Entry(("position_row/embedding",), f"{positions}.0", shape=(rows, 1, widths[0])),
        Entry(("position_column/embedding",), f"{positions}.1", shape=(1, columns, widths[1])),
    ]
    period = len(model.attention_types)
    for i, kind in enumerate(layer_types(model)):
        ours, theirs = f"layers/{i % period}", f"reformer.encoder.layers.{i}"
        layer = (
            *norm(f"{ours}/attention_norm", f"{theirs}.attention.layer_norm"),
            *(
                entry for mine, name in PROJECTIONS[kind].items()
                for entry in dense(f"{ours}/attention/{mine}", f"{theirs}.attention.self_attention.{name}", bias=False)
            ),
            *dense(f"{ours}/attention/out", f"{theirs}.attention.output.dense", bias=False),
            *norm(f"{ours}/mlp_norm", f"{theirs}.feed_forward.layer_norm"),
            *dense(f"{ours}/mlp/wi", f"{theirs}.feed_forward.dense.dense"),
            *dense(f"{ours}/mlp/wo", f"{theirs}.feed_forward.output.dense"),
        )
        entries += [dataclasses.replace(entry, layer=i // period) for entry in layer]
    entries += [
        *norm("final_norm", "reformer.encoder.layer_norm"),
        Entry(("lm_head/kernel",), "lm_head.decoder.weight", transpose=True),
        # Transformers 5.24 adds the bias of the decoder, 5.0 to 5.23 none, 4 the one tensor of both names.
        Entry(("lm_head/bias",), "lm_head.decoder.bias"),
        Entry(("lm_head/bias",), "lm_head.bias"),
    ]
    return Table(
        entries=tuple(entries), prefix="reformer.", copies={"lm_head.decoder.bias": "lm_head.bias"},
        # Constants, stored in older files.
        ignored=tuple(f"reformer.encoder.layers.{i}.attention.self_attention.{name}"
                      for i in range(model.num_layers) for name in BUFFERS),
    )


def models(objective: CausalLM) -> tuple[TransformersModel]:
    """Return the Transformers model that the objective's parameters fill."""
    m, ids = objective.model, special_token_ids(objective)
    config = to_config(m, FIELDS) | FIXED | ids | {
        "model_type": "reformer",
        "attn_layers": layer_types(m),
        "axial_pos_shape": list(m.axial_shape),
        "axial_pos_embds_dim": list(m.axial_widths),
        "max_position_embeddings": m.max_positions,
        "num_buckets": list(m.buckets) if len(m.buckets) > 1 else m.buckets[0],
    }
    return (
        TransformersModel(
            "ReformerModelWithLMHead", "AutoModelForCausalLM", config, table(m),
            # Their cache keeps the buckets of the whole prompt, so the continuation would depend on where it ends.
            generation_config=ids | {"use_cache": False}, pipeline_tag="text-generation",
        ),
    )


def read_objective(source: Source) -> CausalLM:
    """Read causal language modelling with a Reformer."""
    dataclasses.replace(source, config={"is_decoder": False} | dict(source.config)).require(**FIXED)
    for kind in PROJECTIONS:
        source.require(**{f"{kind}_num_chunks_before": 1, f"{kind}_num_chunks_after": 0})
    fields = source.read(FIELDS)
    layers = source.config.get("attn_layers") or ["local", "lsh"] * 3
    if set(layers) - set(PROJECTIONS):
        raise UserError(f"{source.folder / 'config.json'}: attn_layers may only have local and lsh layers.")
    period = next(n for n in range(1, len(layers) + 1) if layers == layers[:n] * (len(layers) // n))
    rows, columns = _read_pair(source, "axial_pos_shape", [64, 64])
    buckets = source.config.get("num_buckets") or default_buckets(rows * columns, fields["lsh_chunk_size"])
    model = Reformer(
        **fields,
        num_layers=len(layers),
        attention_types=tuple(layers[:period]),
        axial_shape=(rows, columns),
        axial_widths=_read_pair(source, "axial_pos_embds_dim", [64, 192]),
        buckets=tuple(buckets) if isinstance(buckets, list) else (source.value("num_buckets", 0),),
    )
    return CausalLM(model=model, plain_stream=is_plain_stream(source))


def _read_pair(source: Source, key: str, default: list[int]) -> tuple[int, int]:
    """Read a list of two whole numbers."""
    value = source.config.get(key) or default
    if not isinstance(value, list) or [type(number) for number in value] != [int, int]:
        raise UserError(f"{source.folder / 'config.json'}: {key} is {value!r}; it must be two whole numbers.")
    return value[0], value[1]


def default_buckets(length: int, chunk: int) -> list[int]:
    """Return the number of buckets that Transformers chooses for a first row of this length.

    It is the power of 2 below 2 · length / chunk, as two factors if it is large.
    """
    power = (2 * (length // chunk)).bit_length() - 1
    if 2**power > 2 * max(int((length // chunk) ** 0.5), chunk):
        return [2 ** (power // 2), 2 ** (power - power // 2)]
    return [2**power]


FAMILY = Family("reformer", models, read_objective)
