"""Small Llamas, Qwens, Mistrals, Gemmas, EuroBERTs, Nomic BERTs and GTEs of Transformers, and their losses."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import tokenizers
import torch
import transformers

from jaxlm.models.base import Inputs
from jaxlm.models.llama import EuroBert, Gemma3, Llama, Mistral, Qwen3
from jaxlm.models.rotary_bert import Gte, NomicBert
from jaxlm.objectives.base import total_loss
from jaxlm.objectives.pretrained import PretrainedModel
from tests.huggingface.support import read_json

TOLERANCE = 1e-5
LENGTH = 40
DELETED = "deleted"
SIZES = dict(
    hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
    max_position_embeddings=128, rms_norm_eps=1e-5,
)
# An epsilon of norms that matters beside embeddings of this size.
POST_NORM = dict(
    hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6, max_position_embeddings=128,
    layer_norm_eps=1e-3,
)
# All three regimes of the scaling: frequencies that are kept, divided, and interpolated.
LLAMA3 = dict(rope_type="llama3", rope_theta=50.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)
PLAIN = dict(rope_type="default", rope_theta=100.0)
CASES = {
    "llama": dict(head_dim=16, rope_parameters=LLAMA3),
    "llama_biased": dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, hidden_act="gelu",
                         rope_parameters=PLAIN | dict(rope_type="linear", factor=4.0)),
    "qwen3": dict(head_dim=8, tie_word_embeddings=True, rope_parameters=PLAIN),
    "mistral": dict(sliding_window=6, rope_parameters=PLAIN),
    "eurobert": dict(rope_parameters=PLAIN),
    # Seven layers: of one period and one more. The weights of norms are those less 1.
    "gemma3_text": dict(
        num_hidden_layers=7, head_dim=8, query_pre_attn_scalar=5, sliding_window=6, layer_types=None,
        rope_parameters=dict(full_attention=dict(rope_type="linear", factor=4.0, rope_theta=100.0),
                             sliding_attention=PLAIN | dict(rope_theta=20.0)),
    ),
    # The head of GTE has gelu whatever the activation of the layers.
    "nomic_bert": dict(rope_parameters=PLAIN),
    "gte": dict(rope_parameters=PLAIN, hidden_act="silu", hidden_dropout_prob=0.0),
}
MODELS = {"llama": Llama, "llama_biased": Llama, "qwen3": Qwen3, "mistral": Mistral, "eurobert": EuroBert,
          "gemma3_text": Gemma3, "nomic_bert": NomicBert, "gte": Gte}
SYMBOLS = {  # special symbols by role, and those around one text and two
    "nomic_bert": (dict(pad="[PAD]", cls="[CLS]", sep="[SEP]", mask="[MASK]"), "[CLS] $A [SEP]",
                   "[CLS] $A [SEP] $B:1 [SEP]:1"),
    "gte": (dict(bos="<s>", pad="<pad>", eos="</s>", cls="<s>", sep="</s>", mask="<mask>"), "<s> $A </s>",
            "<s> $A </s> </s> $B </s>"),
}
LLAMA3_SYMBOLS = (dict(bos="<|begin_of_text|>", eos="<|end_of_text|>", pad="<|end_of_text|>"), "<|begin_of_text|> $A",
                  "<|begin_of_text|> $A <|begin_of_text|> $B")
SYMBOLS["eurobert"] = (LLAMA3_SYMBOLS[0] | dict(mask="<|mask|>"), *LLAMA3_SYMBOLS[1:])
POST = ["nomic_bert", "gte"]
ENCODERS = ["eurobert", *POST]
DECODERS = ["mistral", "llama", "llama_biased", "qwen3", "gemma3_text"]


class Pair(NamedTuple):
    """A model of Transformers, its folder, and the import."""

    theirs: torch.nn.Module
    folder: Path
    ours: PretrainedModel


def save_tokenizer(folder: Path, name: str) -> transformers.PreTrainedTokenizerFast:
    """Save byte-level BPE; Llama 3's special tokens are no [CLS] or [SEP], and the padding is the end symbol."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=270, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, then it ran under the tree."] * 4, trainer)
    roles, single, pair = SYMBOLS.get(name, LLAMA3_SYMBOLS)
    tokenizer.add_special_tokens([tokenizers.AddedToken(symbol, lstrip=symbol == roles.get("mask"))
                                  for symbol in dict.fromkeys(roles.values())])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=single, pair=pair,
        special_tokens=[(symbol, tokenizer.token_to_id(symbol)) for symbol in {*roles.values()} & {*single.split()}],
    )
    inputs = ["input_ids", *["token_type_ids"] * (":1" in pair), "attention_mask"]
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_input_names=inputs, **{f"{role}_token": text for role, text in roles.items()}
    )
    fast.save_pretrained(folder)
    return fast


def save(name: str, folder: Path, **changes) -> torch.nn.Module:
    """Save a model with random weights; unit norms and zero biases would hide a mix-up."""
    tokenizer = save_tokenizer(folder, name)
    roles = ("pad",) if name in POST else ("pad", "bos", "eos", *(["mask"] if name == "eurobert" else []))
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in roles}
    config = transformers.AutoConfig.for_model(
        name.removesuffix("_biased"),
        **((POST_NORM if name in POST else SIZES) | CASES[name] | ids | dict(vocab_size=len(tokenizer)) | changes),
    )
    config._attn_implementation = "eager"
    auto = transformers.AutoModelForMaskedLM if name in ENCODERS else transformers.AutoModelForCausalLM
    model, generator = auto.from_config(config).eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            is_norm = "norm" in key.lower()
            scale = float(is_norm and name != "gemma3_text" and key.endswith("weight"))
            parameter.copy_(scale + (0.3 if is_norm else 0.15) * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return model


def rows() -> tuple[np.ndarray, np.ndarray]:
    """Return ids and mask of three rows, of 40, 30 and 7 tokens."""
    mask = (np.arange(LENGTH) < np.array([[LENGTH], [30], [7]])).astype(np.int32)
    return np.random.default_rng(0).integers(0, 265, (3, LENGTH)).astype(np.int32) * mask, mask


def example(is_causal: bool, num_types: int = 1) -> dict[str, np.ndarray]:
    """Return the rows as the corrupted example of an objective; a masked LM predicts tokens 2, 5 and 6 of each row.

    From token 4 on the segment type is the last one.
    """
    ids, mask = rows()
    if is_causal:
        labels, weights = (np.pad(x[:, 1:], ((0, 0), (0, 1))) for x in (ids, mask))
        return {"input_ids": ids, "segment_ids": mask, "labels": labels, "weights": weights.astype(np.float32)}
    positions, types = np.tile(np.int32([2, 5, 6]), (3, 1)), np.zeros_like(ids)
    types[:, 4:] = num_types - 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types, "masked_labels": positions,
            "masked_positions": positions, "masked_weights": np.ones((3, 3), np.float32)}


@functools.partial(jax.jit, static_argnums=0)
def forward_and_backward(objective, params, given):
    """Return loss, logits and gradients by one program."""
    def loss(params):
        mask = given.get("attention_mask", given.get("segment_ids"))
        inputs = Inputs(given["input_ids"], given.get("token_type_ids"), mask)
        logits = objective.model.predict_tokens(params, objective.model.hidden_states(params, inputs))
        return total_loss(objective.loss(params, given, jax.random.key(0), True)), logits

    return jax.value_and_grad(loss, has_aux=True)(params)


def torch_loss(model: torch.nn.Module, is_causal: bool) -> tuple[torch.Tensor, np.ndarray]:
    """Return their loss of the example, and their logits."""
    ids, mask = (torch.tensor(x).long() for x in rows())
    if not is_causal and "CausalLM" in type(model).__name__:  # which would compare with the token after it
        logits, labels = model(input_ids=ids, attention_mask=mask).logits, torch.tensor([2, 5, 6] * 3)
        return torch.nn.functional.cross_entropy(logits[:, [2, 5, 6]].flatten(0, 1), labels), logits.detach().numpy()
    labels = torch.full_like(ids, -100)
    if is_causal:
        labels = torch.where(mask > 0, ids, labels)
    else:
        labels[:, [2, 5, 6]] = torch.tensor([2, 5, 6])
    types = {}
    if (count := getattr(model.config, "type_vocab_size", 1)) > 1:
        types = {"token_type_ids": torch.tensor(example(False, count)["token_type_ids"]).long()}
    out = model(input_ids=ids, attention_mask=mask, labels=labels, **types)
    return out.loss, out.logits.detach().numpy()


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the largest difference at tokens; with a window, padding has no real key in some implementations."""
    is_real = rows()[1] > 0
    return float(np.abs(np.asarray(ours)[is_real] - theirs[is_real]).max())


def changed(folder: Path, out: Path, changes: dict) -> Path:
    """Copy a folder with other keys in its config.json; those with the value DELETED are left out."""
    shutil.copytree(folder, out)
    config = {key: value for key, value in (read_json(out / "config.json") | changes).items() if value != DELETED}
    (out / "config.json").write_text(json.dumps(config))
    return out
