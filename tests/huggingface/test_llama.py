"""Llama, Qwen 3, Mistral, Gemma 3, EuroBERT, Nomic BERT and GTE against Transformers: logits, gradients, config.json.

Matrices are drawn with a standard deviation of 0.15: at the classes' own initialization a wrong base of rotary
positions moves EuroBERT's logits by 2e-3 only. Two of six heads are key/value heads, since with one or six their order
would not matter; the base is small, so that all frequencies turn within 40 positions.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.core_model_loading import revert_weight_conversion

from jaxlm.config.experiment import OptimizerConfig, TrainConfig
from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.huggingface.families import family_named, family_of
from jaxlm.huggingface.family import Source
from jaxlm.inference.fill_mask import fill_mask
from jaxlm.inference.generate import generate
from jaxlm.inference.score import Pair as ScoredPair
from jaxlm.inference.score import score
from jaxlm.models.base import Inputs
from jaxlm.models.llama import EuroBert, Gemma3, Llama, Mistral, Qwen3
from jaxlm.models.rotary_bert import Gte, NomicBert
from jaxlm.objectives.base import total_loss
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.parallel.mesh import MeshConfig, make_mesh
from jaxlm.tasks.classification import Classification
from jaxlm.training.program import Program, corruption_key
from jaxlm.types import TokenBatch
from tests.huggingface import test_modernbert
from tests.huggingface.support import TorchAdamW, read_json
from tests.params import first_fast, random_params

TOLERANCE = 1e-5
LENGTH = 40
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
each_case = pytest.mark.parametrize("name", CASES)


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


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory):
    @functools.cache
    def make(name: str) -> Pair:
        folder = tmp_path_factory.mktemp(name)
        theirs = save(name, folder)
        return Pair(theirs, folder, import_folder(folder))

    return make


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


@each_case
def test_logits_loss_and_all_gradients(name, pair):
    theirs, _, imported = pair(name)
    is_causal, model = name not in ENCODERS, imported.objective.model
    assert type(model) is MODELS[name] and not imported.fresh
    given = example(is_causal, getattr(model, "type_vocab_size", 1) or 1)
    (loss, logits), gradients = forward_and_backward(imported.objective, imported.params, given)
    theirs.zero_grad()
    expected, other = torch_loss(theirs, is_causal)
    assert 0.7 < other.std() < 3.0  # agreement on zeros would prove nothing
    layers = len(theirs.base_model.layers)
    assert difference(logits, other) < TOLERANCE * layers / 3  # rounding adds up: Gemma's seven are 1.1e-5 off
    assert float(loss) == pytest.approx(expected.item(), abs=TOLERANCE)
    expected.backward()
    weights = revert_weight_conversion(theirs, {key: leaf.grad for key, leaf in theirs.named_parameters()})
    table = family_of(imported.objective).models(imported.objective)[0].table
    found = dict(table.to_transformers(jax.device_get(gradients)))
    assert found.keys() == weights.keys()
    padding = theirs.config.pad_token_id
    for key, gradient in found.items():
        wanted = weights[key].numpy()
        if key == "model.embed_tokens.weight" and not model.tied_head:  # theirs is never trained at the padding symbol
            assert not wanted[padding].any()
            gradient, wanted = (np.delete(x, padding, 0) for x in (gradient, wanted))
        assert np.abs(wanted).max() > 1e-4, key
        np.testing.assert_allclose(gradient, wanted, rtol=1e-3, atol=TOLERANCE, err_msg=key)


BOTH = "use_bidirectional_attention"
BIDIRECTIONAL = [
    ("mistral", dict(is_causal=False), 6), ("gemma3_text", {BOTH: True}, 3), ("gemma3_text", dict(is_causal=False), 6),
    ("gemma3_text", {BOTH: True, "is_causal": False}, 4), ("llama", dict(is_causal=False), None),
    ("llama", dict(is_causal=None), None), ("llama_biased", dict(is_causal=False), None),
    ("qwen3", dict(is_causal=False), None),
]
"""Family, keys of config.json, and number of tokens that a local one attends to on either side."""


def load_torch(folder: Path, kind=transformers.AutoModelForCausalLM) -> torch.nn.Module:
    """Return their model of a folder that has all of its tensors and no others."""
    model, report = kind.from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@pytest.mark.parametrize(("name", "keys", "reach"), first_fast(BIDIRECTIONAL, 2))
def test_bidirectional_attention(name, keys, reach, pair, tmp_path):
    """Their decoders read the key; so do imports, and exports have it."""
    folder = changed(pair(name).folder, tmp_path / "hf", keys)
    theirs, imported = load_torch(folder), import_folder(folder)
    model = imported.objective.model
    assert not model.is_causal and type(model) is MODELS[name] and getattr(model, "window", None) == reach
    (loss, logits), gradients = forward_and_backward(imported.objective, imported.params, example(False))
    expected, other = torch_loss(theirs, False)
    expected.backward()
    assert difference(torch_loss(pair(name).theirs, True)[1], other) > 1  # causal logits
    assert difference(logits, other) < TOLERANCE * model.num_layers / 3
    assert float(loss) == pytest.approx(expected.item(), abs=TOLERANCE)
    table = family_of(imported.objective).models(imported.objective)[0].table
    weights, padding = dict(theirs.named_parameters()), theirs.config.pad_token_id
    for key, gradient in table.to_transformers(jax.device_get(gradients)):
        wanted = weights[key].grad.numpy()
        if key == "model.embed_tokens.weight" and not model.tied_head:
            gradient, wanted = (np.delete(x, padding, 0) for x in (gradient, wanted))
        np.testing.assert_allclose(gradient, wanted, rtol=1e-3, atol=TOLERANCE, err_msg=key)
    out = export_folder(tmp_path / "out", imported.objective, imported.params, imported.tokenizer, ModelCard())
    before, after = (load_file(path / "model.safetensors") for path in (folder, out))
    assert before.keys() == after.keys() and all(np.array_equal(before[key], after[key]) for key in before)
    assert difference(torch_loss(load_torch(out), False)[1], other) < 1e-6
    assert import_folder(out).objective.model == model
    for change in (-1, 1) if reach else ():
        wrong = dataclasses.replace(imported.objective, model=dataclasses.replace(model, window=reach + change))
        assert difference(forward_and_backward(wrong, imported.params, example(False))[0][1], other) > 0.5


@pytest.mark.parametrize("name", first_fast(DECODERS, 2))
def test_a_decoder_becomes_an_encoder_and_one_again(name, pair, tmp_path):
    """By Transformers' class with `is_causal` false; a Llama's is EuroBERT's where it has all parts."""
    _, folder, imported = pair(name)
    theirs = load_torch(changed(folder, tmp_path / "hf", dict(is_causal=False)))
    found, v = imported.in_direction(False), imported.tokenizer.vocabulary
    model, new = found.objective.model, found.tokenizer.vocabulary
    assert type(model) is (EuroBert if name == "llama" else MODELS[name]) and not model.is_causal
    assert (new.mask, new.cls, new.sep, new.size) == (v.size, v.bos, v.eos, v.size + 1) == (272, 270, 271, 273)
    assert jax.tree.all(jax.tree.map(np.array_equal, found.params["encoder"], imported.params["encoder"]))
    table, old = (each.params["embeddings"]["word"]["embedding"] for each in (found, imported))
    assert model.vocab_size == len(table) == 273 and np.array_equal(table[:272], old)
    np.testing.assert_allclose(table[272], old.mean(0), atol=1e-6)
    objective = MaskedLM(model=model, input_format="document").bind(new, LENGTH)
    logits = forward_and_backward(objective, found.params, example(False))[0][1]
    other = torch_loss(theirs, False)[1]
    assert difference(logits[..., :272], other) < TOLERANCE * model.num_layers / 3
    out = export_folder(tmp_path / "out", objective, found.params, found.tokenizer, ModelCard())
    kind = transformers.AutoModelForMaskedLM if name == "llama" else transformers.AutoModelForCausalLM
    assert difference(logits, torch_loss(load_torch(out, kind), False)[1]) < TOLERANCE * model.num_layers / 3
    tokenizer, text = transformers.AutoTokenizer.from_pretrained(out), "the cat [MASK] on the mat"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.mask_token == "[MASK]" and (ids[0], ids[-1], ids.count(272)) == (v.bos, v.eos, 1)
    assert ids == [v.bos, *found.tokenizer.encode_with_symbols(text), v.eos]
    assert ids[ids.index(272) - 1] != 220  # it takes the space before it
    again = import_folder(out)
    assert again.objective.model == model and again.objective.text_template.num_symbols(pair=False) == 2
    back = again.in_direction(True)
    assert back.objective.model == dataclasses.replace(imported.objective.model, vocab_size=273)
    logits = forward_and_backward(imported.objective, imported.params, example(True))[0][1]
    causal = CausalLM(model=back.objective.model).bind(new, LENGTH)
    again = forward_and_backward(causal, back.params, example(True))[0][1][..., :272]
    np.testing.assert_allclose(again, logits, atol=TOLERANCE)


def test_a_mask_of_tokens_in_reserve(pair, tmp_path):
    """Llama 3 has some. A tokenizer with a mask keeps it; one without begin symbol begins texts with the end symbol."""
    imported = pair("llama").ours
    reserve = imported.tokenizer.with_symbols(["<|reserved_special_token_0|>", "<|reserved_special_token_1|>"])
    found = dataclasses.replace(imported, tokenizer=reserve).in_direction(False)
    assert found.params is imported.params and found.tokenizer.vocabulary.mask == 272 == len(reserve) - 2
    assert found.tokenizer.encode_with_symbols("the <|reserved_special_token_0|>") == [*reserve.encode("the"), 272]
    assert found.in_direction(False).tokenizer == found.tokenizer
    content = read_json(pair("llama").folder / "tokenizer_config.json") | {"bos_token": None}
    folder = Path(shutil.copytree(pair("llama").folder, tmp_path / "hf"))
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    v = import_folder(folder).in_direction(False).tokenizer.vocabulary
    assert (v.bos, v.cls, v.sep, v.mask) == (-1, 271, 271, 272)


def test_a_mask_is_predicted_by_the_state_before_it(pair, tmp_path):
    """Loss, filled masks, scores and config.json (LLM2Vec's masked next-token prediction)."""
    imported = pair("llama").ours.in_direction(False)
    objective = MaskedLM(model=imported.objective.model, input_format="document", predicts_next=True)
    objective = objective.bind(imported.tokenizer.vocabulary, LENGTH)
    out = export_folder(tmp_path / "out", objective, imported.params, imported.tokenizer, ModelCard())
    assert "predicted at the position before them" in (out / "README.md").read_text()
    loaded, theirs = import_folder(out), load_torch(out, transformers.AutoModelForMaskedLM)
    assert loaded.objective.predicts_next and not pair("llama").ours.objective.predicts_next
    loss = forward_and_backward(objective, imported.params, example(False))[0][0]
    logits, labels = torch.tensor(torch_loss(theirs, False)[1]), torch.tensor([2, 5, 6] * 3)
    expected = torch.nn.functional.cross_entropy(logits[:, [1, 4, 5]].flatten(0, 1), labels)
    assert float(loss) == pytest.approx(expected.item(), abs=TOLERANCE)
    ids = torch.tensor([objective.text_template.build(objective.vocabulary, imported.tokenizer.encode_with_symbols(
        "the cat[MASK] on the mat")).input_ids.tolist()]).long()
    (at,) = (ids[0] == 272).nonzero()[0]
    with torch.no_grad():
        wanted = theirs(input_ids=ids).logits[0, at - 1].softmax(-1).sort(descending=True)
    filled = fill_mask(loaded, ["the cat [MASK] on the mat"], 4)[0][0]
    np.testing.assert_allclose([p for _, p in filled], wanted[0][:4], atol=1e-5)
    text = imported.tokenizer.encode(" sat")
    with torch.no_grad():
        masked = torch.tensor([[270, 272, 271]] if len(text) == 1 else [[270, 272, *text[1:], 271]])
        first = theirs(input_ids=masked).logits[0, 0].log_softmax(-1)[text[0]]
    assert score(loaded, [ScoredPair([], text)])[0].log_probs[0] == pytest.approx(first.item(), abs=1e-4)
    batch = TokenBatch(np.full((400, LENGTH - 2), 7, np.int32), np.ones((400, LENGTH - 2), np.int32))
    made = jax.jit(objective.corrupt)(jax.random.key(0), batch)
    assert np.asarray(made["masked_positions"])[np.asarray(made["masked_weights"]) > 0].min() == 1


@pytest.mark.parametrize("name", ["mistral", "eurobert", "nomic_bert"])
def test_padding_in_front(name, pair):
    """As embedders made of decoders have it; positions count the padding on both sides."""
    theirs, _, imported = pair(name)
    ids, mask = (x[:, ::-1].copy() for x in rows())
    given = example(name not in ENCODERS) | {"input_ids": ids}
    given["segment_ids" if name == "mistral" else "attention_mask"] = mask
    (_, logits), _ = forward_and_backward(imported.objective, imported.params, given)
    with torch.no_grad():
        other = theirs(input_ids=torch.tensor(ids).long(), attention_mask=torch.tensor(mask).long()).logits.numpy()
    assert np.abs(np.asarray(logits)[mask > 0] - other[mask > 0]).max() < TOLERANCE


@each_case
def test_round_trip(name, pair, tmp_path):
    theirs, folder, imported = pair(name)
    out = export_folder(tmp_path / "out", imported.objective, imported.params, imported.tokenizer, ModelCard())
    before, after = (load_file(path / "model.safetensors") for path in (folder, out))
    assert before.keys() == after.keys() and all(np.array_equal(before[key], after[key]) for key in before)
    again, report = type(theirs).from_pretrained(out, attn_implementation="eager", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours, other = again.config.to_dict(), theirs.config.to_dict()
    assert {key: value for key, value in other.items() if ours.get(key) != value and key != "_name_or_path"} == {}
    assert import_folder(out).objective.model == imported.objective.model


@pytest.mark.parametrize("name", first_fast(DECODERS, 1))
def test_cached_logits_and_continuations(name, pair):
    """Prompts of several lengths, padded on the left, longer than the window."""
    theirs, _, imported = pair(name)
    model, ids = imported.objective.model, rows()[0]
    (_, whole), _ = forward_and_backward(imported.objective, imported.params, example(True))
    sizes = np.array([30, 20, 3])
    prompts = np.stack([np.pad(row[:size], (30 - size, 0)) for row, size in zip(ids, sizes, strict=True)])
    is_text, decode = np.arange(30) >= 30 - sizes[:, None], jax.jit(model.decode)
    out, state = jax.jit(model.prefill, static_argnums=3)(imported.params, prompts, is_text, 5)
    assert jax.tree.leaves(state.caches)[0].shape == (3, 35, 2, model.head_dim)  # few heads
    for step in range(4):
        found = [whole[row, size + step - 1] for row, size in enumerate(sizes)]
        np.testing.assert_allclose(out, found, atol=2 * TOLERANCE)  # of two ways of computing with seven layers
        out, state = decode(imported.params, np.array([ids[row, size + step] for row, size in enumerate(sizes)]), state)
    with torch.no_grad():
        wanted = theirs.generate(
            torch.tensor(prompts).long(), attention_mask=torch.tensor(is_text).long(), max_new_tokens=12,
            do_sample=False, eos_token_id=999, pad_token_id=0,
        )[:, 30:].tolist()
    assert len({tuple(row) for row in wanted}) == 3  # the prompts have an effect
    texts = [row[:size].tolist() for row, size in zip(ids, sizes, strict=True)]
    assert generate(imported.objective, imported.params, texts, max_new_tokens=12, stop_ids=[]) == wanted


def changed(folder: Path, out: Path, changes: dict) -> Path:
    """Copy a folder with other keys in its config.json; those with the value DELETED are left out."""
    shutil.copytree(folder, out)
    config = {key: value for key, value in (read_json(out / "config.json") | changes).items() if value != DELETED}
    (out / "config.json").write_text(json.dumps(config))
    return out


DELETED = "deleted"
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=2.0)
LOCAL = ["full_attention"] * 2 + ["sliding_attention"]
REFUSED = [
    ("llama", dict(rope_parameters=YARN), "rope_parameters"), ("llama", dict(rope_scaling=YARN), "rope_scaling"),
    ("llama", dict(rope_parameters=dict(full_attention=PLAIN)), "rope_parameters"),
    *(("llama", dict(rope_scaling=dict(type=kind, factor=2.0)), kind) for kind in ("ntk", "dynamic", "longrope")),
    ("llama", dict(partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),  # LLAMA3 reads it
    ("llama", dict(rope_scaling=dict(rope_type="llama3", factor=2.0)), "low_freq_factor, high_freq_factor"),
    ("llama", dict(rope_scaling=LLAMA3 | dict(low_freq_factor=4.0)), "rope_scaling"),
    ("llama", dict(rope_scaling=[8.0]), "rope_scaling"), ("llama", dict(rope_theta="1e4"), "rope_theta"),
    ("llama", dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
    ("mistral", dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
    ("mistral", dict(sliding_window=0), "window"), ("qwen3", dict(use_sliding_window=True), "use_sliding_window"),
    ("qwen3", dict(layer_types=LOCAL), "layer_types"), ("eurobert", dict(mlp_bias=True), "mlp_bias"),
    ("eurobert", dict(classifier_pooling="max"), "classifier_pooling"),
    ("eurobert", dict(hidden_act="relu6"), "hidden_act"), ("eurobert", dict(hidden_act="relu"), "activation"),
    ("gemma3_text", dict(final_logit_softcapping=30.0), "final_logit_softcapping"),
    ("gemma3_text", dict(use_bidirectional_attention=True, sliding_window=7), "sliding_window is 7"),
    ("gemma3_text", dict(use_bidirectional_attention="vision"), "use_bidirectional_attention"),
    ("gemma3_text", dict(layer_types=LOCAL * 2 + LOCAL[:1]), "layer_types"),
    ("gemma3_text", dict(rope_scaling=YARN), "rope_parameters"),
    ("gemma3_text", dict(rope_parameters=dict(sliding_attention=dict(rope_type="linear", factor=2.0))), "rope_type"),
    ("eurobert", dict(num_key_value_heads=4), "num_kv_heads"), ("eurobert", dict(head_dim=7), "head_dim"),
    *(("nomic_bert", {key: True}, f"{key} is True") for key in (
        "prenorm", "causal", "use_rms_norm", "rotary_emb_interleaved", "parallel_block", "qkv_proj_bias",
        "mlp_fc1_bias", "mlp_fc2_bias")),
    ("nomic_bert", dict(rotary_emb_fraction=0.5), "rotary_emb_fraction"),
    ("nomic_bert", dict(num_experts=8), "num_experts"),
    ("nomic_bert", dict(rotary_scaling_factor=2.0), "rotary_scaling_factor"),
    ("nomic_bert", dict(activation_function="gelu"), "activation_function"),
    ("nomic_bert", dict(hidden_act="relu"), "activation"), ("nomic_bert", dict(type_vocab_size=0), "type_vocab_size"),
    *((name, dict(tie_word_embeddings=False), "tie_word_embeddings") for name in POST),
    *((name, dict(head_dim=16), "head_dim") for name in POST),
    *((name, dict(rope_parameters=YARN), "rope_type is 'yarn'") for name in POST),
    ("nomic_bert", dict(rope_scaling=dict(type="dynamic", factor=2.0)), "'dynamic'"),
    ("nomic_bert", dict(rope_parameters=dict(full_attention=PLAIN)), "full_attention"),
    ("gte", dict(rope_theta=20000.0, rope_scaling=dict(type="ntk", factor=8.0)), "rope_type is 'ntk'"),
    ("gte", dict(layer_norm_type="rms_norm"), "layer_norm_type"),
    ("gte", dict(logn_attention_scale=True), "logn_attention_scale"),
    ("gte", dict(position_embedding_type="absolute"), "position_embedding_type"),
]


@pytest.mark.parametrize(("name", "changes", "words"), REFUSED)
def test_unsupported_configurations_are_refused_by_name(name, changes, words, pair, tmp_path):
    with pytest.raises(UserError, match=rf"config\.json.*{words}"):
        import_folder(changed(pair(name).folder, tmp_path / "hf", changes))


IGNORED = [
    ("qwen3", dict(partial_rotary_factor=0.5)), ("eurobert", dict(clf_pooling="bos", is_decoder=True, is_causal=True)),
    ("llama", dict(rope_interleaved=True, pretraining_tp=4, use_cache=False, sliding_window=3)),
    ("qwen3", dict(max_window_layers=0, sliding_window=3, mlp_bias=True)),
    ("mistral", dict(attention_bias=True, mlp_bias=True, layer_types=LOCAL)),
    ("gemma3_text", dict(attn_logit_softcapping=1.0, mlp_bias=True, hidden_act="relu", _sliding_window_pattern=2)),
    # The keys of the class win.
    ("nomic_bert", dict(n_embd=6, n_layer=7, rotary_emb_base=9.0, layer_norm_epsilon=1.0, num_key_value_heads=1)),
    *((name, dict(partial_rotary_factor=0.5, is_decoder=True, is_causal=True, sliding_window=3)) for name in POST),
]


@pytest.mark.parametrize(("name", "changes"), IGNORED)
def test_keys_that_the_class_ignores_are_ignored(name, changes, pair, tmp_path):
    theirs, folder, imported = pair(name)
    folder = changed(folder, tmp_path / "hf", changes)
    other = type(theirs).from_pretrained(folder, attn_implementation="eager").eval()
    is_causal = name not in ENCODERS
    np.testing.assert_array_equal(torch_loss(other, is_causal)[1], torch_loss(theirs, is_causal)[1])
    assert import_folder(folder).objective.model == imported.objective.model


OLD = dict(rope_parameters=DELETED)
FORMS = [
    ("llama", OLD | dict(rope_theta=77.0)), ("llama", OLD | dict(rope_theta=77.0, rope_scaling=None)), ("llama", OLD),
    ("llama", OLD | dict(rope_theta=77.0, rope_scaling={"type": "linear", "factor": 3.0})),
    # It replaces rope_parameters, and takes the base from beside it.
    ("llama", dict(rope_theta=77.0, rope_scaling=dict(rope_type="linear", factor=3.0))),
    ("llama", dict(rope_theta=77.0)), ("llama", dict(original_max_position_embeddings=32)),
    ("llama", dict(rope_scaling={k: v for k, v in LLAMA3.items() if not k.startswith("original")})),
    *((name, dict(num_key_value_heads=value, head_dim=value))
      for name in ("llama", "eurobert") for value in (None, DELETED)),
    *((name, dict(num_key_value_heads=value, head_dim=DELETED, num_attention_heads=32, hidden_size=64))
      for name, value in (("qwen3", None), ("qwen3", DELETED), ("mistral", DELETED))),
    *((name, changes) for name in POST for changes in (
        OLD, OLD | dict(rope_theta=77.0), OLD | dict(rope_theta=77.0, rope_scaling=None), dict(rope_theta=77.0),
        dict(rope_theta=77.0, rope_scaling=dict(rope_type="default")),
        dict(rope_theta=77.0, rope_scaling=dict(rope_type="default", rope_theta=33.0)))),
]


@pytest.mark.parametrize(("name", "changes"), FORMS)
def test_old_and_missing_keys_are_read_as_by_the_class(name, changes, pair, tmp_path):
    """Frequencies, and numbers and widths of heads."""
    folder = changed(pair(name).folder, tmp_path / "hf", changes)
    config, content = transformers.AutoConfig.from_pretrained(folder), read_json(folder / "config.json")
    model = family_named(name, "here").read_objective(Source(folder, content, ())).model
    if name not in POST:
        assert (model.num_kv_heads, model.head_dim) == (config.num_key_value_heads, config.head_dim)
    module = importlib.import_module(type(pair(name).theirs).__module__)
    rotary = next(value for key, value in vars(module).items() if key.endswith("RotaryEmbedding"))
    np.testing.assert_allclose(model.stack.rope.frequencies(model.head_dim), rotary(config).inv_freq, rtol=1e-6)


BASES = dict(full_attention=dict(rope_type="default", rope_theta=30.0), sliding_attention=None)
GEMMA_FORMS = [
    dict(rope_parameters=DELETED), dict(rope_parameters=DELETED, rope_theta=30.0, rope_local_base_freq=7.0),
    dict(rope_parameters=DELETED, rope_theta=30.0, rope_scaling=dict(rope_type="linear", factor=8.0)),
    dict(rope_parameters=BASES, rope_local_base_freq=7.0),
    dict(rope_parameters=BASES, rope_scaling=dict(rope_type="linear", factor=8.0)),  # it keeps the base
    dict(layer_types=DELETED), dict(layer_types=DELETED, sliding_window_pattern=3),
    dict(layer_types=DELETED, sliding_window_pattern=9), dict(layer_types=["sliding_attention"] * 7),
    dict(head_dim=DELETED, num_key_value_heads=DELETED, num_attention_heads=4, query_pre_attn_scalar=DELETED),
    dict(sliding_window=DELETED, tie_word_embeddings=DELETED, hidden_activation=DELETED),
]


@pytest.mark.parametrize("changes", GEMMA_FORMS)
def test_keys_of_gemma_are_read_as_by_the_class(changes, pair, tmp_path):
    folder = changed(pair("gemma3_text").folder, tmp_path / "hf", changes)
    config, content = transformers.AutoConfig.from_pretrained(folder), read_json(folder / "config.json")
    model = family_named("gemma3_text", "here").read_objective(Source(folder, content, ())).model
    theirs = (config.num_key_value_heads, config.head_dim, config.query_pre_attn_scalar, config.sliding_window,
              config.tie_word_embeddings)
    assert theirs == (model.num_kv_heads, model.head_dim, model.score_width, model.window, model.tied_head)
    assert model.activation == "gelu_new" and config.hidden_activation == "gelu_pytorch_tanh"
    rotary = transformers.models.gemma3.modeling_gemma3.Gemma3RotaryEmbedding(config)
    for layer, kind in enumerate(config.layer_types):
        own = model.stack.of_layer(layer)
        assert own.band == (model.window if kind == "sliding_attention" else None)
        frequencies = getattr(rotary, f"{kind}_inv_freq", None)
        np.testing.assert_allclose(own.rope.frequencies(model.head_dim), frequencies, rtol=1e-6)


@pytest.mark.parametrize("pooling", ["late", "mean", "bos"])
def test_pooling_of_the_classifier(pooling, pair, tmp_path):
    _, _, imported = pair("eurobert")
    model = dataclasses.replace(imported.objective.model, classifier_pooling=pooling)
    task = Classification(model=model, labels=("a", "b", "c")).bind(imported.tokenizer.vocabulary, LENGTH)
    params, (ids, mask) = random_params(task), rows()
    out = export_folder(tmp_path / "out", task, params, imported.tokenizer, ModelCard())
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(out).eval()
    assert theirs.config.classifier_pooling == pooling
    with torch.no_grad():
        wanted = theirs(input_ids=torch.tensor(ids).long(), attention_mask=torch.tensor(mask).long()).logits.numpy()
    given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids), "row": np.arange(3)}
    found = jax.jit(task.predict)(params, given)["logits"]
    assert np.abs(wanted).max() > 0.3
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE)
    assert import_folder(out).objective.model == task.model


@pytest.mark.parametrize("name", first_fast(["qwen3", "gemma3_text"]))
def test_classes_of_texts_by_an_encoder_with_a_decoders_layers(name, pair, tmp_path):
    """The last token is read, as by the class; texts stand between the begin and the end symbol."""
    imported = pair(name).ours.in_direction(False)
    v = imported.tokenizer.vocabulary
    task = Classification(model=imported.objective.model, labels=("a", "b", "c")).bind(v, LENGTH)
    template = task.fine_tuning.template
    assert template.build(v, np.array([5, 6]), np.array([7])).input_ids.tolist() == [v.bos, 5, 6, v.eos, 7, v.eos]
    params, (ids, mask) = random_params(task), rows()
    out = export_folder(tmp_path / "out", task, params, imported.tokenizer, ModelCard())
    theirs = load_torch(out, transformers.AutoModelForSequenceClassification)
    padded = torch.tensor(np.where(mask, ids, v.pad)).long()  # their class finds the last token by it
    with torch.no_grad():
        wanted = theirs(input_ids=padded, attention_mask=torch.tensor(mask).long()).logits.numpy()
    given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids), "row": np.arange(3)}
    assert np.abs(wanted).max() > 0.3
    # Scales around 1 are around 2 in Gemma, whose seven layers round more.
    np.testing.assert_allclose(jax.jit(task.predict)(params, given)["logits"], wanted, atol=1e-4)
    assert import_folder(out).objective.model == task.model


def test_masks_are_filled_without_cls_and_with_the_end_symbol_as_padding(pair, tmp_path):
    """The batch is padded with the end symbol; the mask takes the space before it."""
    imported = pair("eurobert").ours
    v = imported.tokenizer.vocabulary
    assert v.pad == v.eos == v.sep and v.cls == v.bos and v.mask not in (v.pad, v.bos)
    out = export_folder(tmp_path / "out", imported.objective, imported.params, imported.tokenizer, ModelCard())
    before, after = (transformers.AutoTokenizer.from_pretrained(path) for path in (pair("eurobert").folder, out))
    texts = ["the cat <|mask|> on the mat", "the<|mask|>", "옛날에 🙂  <|mask|> tree\n ran under it then"]
    for text in texts:
        assert before(text).data == after(text).data and before(text)["input_ids"][0] == v.bos
        assert before(text)["input_ids"][1:] == imported.tokenizer.encode_with_symbols(text)
    assert before(*texts[:2]).data == after(*texts[:2]).data
    library = transformers.pipeline("fill-mask", model=str(out), tokenizer=str(out), top_k=3)
    *filled, named = fill_mask(imported, [*texts, "the cat [MASK] on the mat"], 3)
    assert named == filled[0]
    for text, answers in zip(texts, filled, strict=True):
        np.testing.assert_allclose([p for _, p in answers[0]], [each["score"] for each in library(text)], atol=1e-5)


@pytest.mark.parametrize("name", ["eurobert", "qwen3", *POST])
def test_a_folder_of_the_bare_model(name, pair, tmp_path):
    """Its names have no prefix. A head of its own is initialized, a tied one is there."""
    theirs, _, imported = pair(name)
    bare = Path(shutil.copytree(pair(name).folder, tmp_path / "bare"))
    theirs.base_model.save_pretrained(bare)
    found = import_folder(bare)
    assert found.fresh == {"eurobert": ("lm_head",), "qwen3": ()}.get(name, ("mlm_head",))
    assert jax.tree.all(jax.tree.map(np.array_equal, found.params["encoder"], imported.params["encoder"]))
    assert found.objective.model == imported.objective.model


@pytest.mark.parametrize(("name", "field"), [
    ("mistral", "attention_bias"), ("mistral", "mlp_bias"), ("qwen3", "mlp_bias"), ("eurobert", "mlp_bias"),
])
def test_biases_that_the_class_lacks_are_not_exported(name, field, pair, tmp_path):
    imported = pair(name).ours
    model = dataclasses.replace(imported.objective.model, **{field: True})
    objective = dataclasses.replace(imported.objective, model=model)
    with pytest.raises(UserError, match=f"{field} has no counterpart in Transformers' {name}"):
        export_folder(tmp_path / "out", objective, imported.params, imported.tokenizer, ModelCard())


def test_a_second_matrix_beside_a_tied_one_is_refused(pair, tmp_path):
    """Transformers reads such a folder with two matrices, whatever its config.json says."""
    folder = Path(shutil.copytree(pair("qwen3").folder, tmp_path / "hf"))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, folder / "model.safetensors")
    assert import_folder(folder).objective.model.tied_head
    save_file(tensors | {"lm_head.weight": 2 * tensors["model.embed_tokens.weight"]}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head\.weight; this model ties them"):
        import_folder(folder)


PUBLISHED = dict(
    n_embd=48, n_layer=3, n_head=6, n_inner=64, n_positions=128, layer_norm_epsilon=1e-3, rotary_emb_base=100,
    rotary_emb_fraction=1.0, rotary_emb_interleaved=False, rotary_emb_scale_base=None, rotary_scaling_factor=None,
    activation_function="swiglu", prenorm=False, causal=False, use_rms_norm=False, parallel_block=False,
    qkv_proj_bias=False, mlp_fc1_bias=False, mlp_fc2_bias=False, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0,
    type_vocab_size=2, use_flash_attn=True, pad_vocab_size_multiple=64,
)


def test_the_published_keys_of_nomic_are_read(pair, tmp_path):
    """The class ignores them, and would read another model."""
    _, folder, imported = pair("nomic_bert")
    folder, model = Path(shutil.copytree(folder, tmp_path / "hf")), imported.objective.model
    published = PUBLISHED | dict(model_type="nomic_bert", vocab_size=model.vocab_size)
    (folder / "config.json").write_text(json.dumps(published))
    assert transformers.AutoConfig.from_pretrained(folder).hidden_size == 768
    found = import_folder(folder)
    assert found.objective.model == model and not found.fresh


@pytest.mark.parametrize("name", POST)
def test_missing_keys_have_the_values_of_the_class(name):
    config = transformers.AutoConfig.for_model(name)
    model = family_named(name, "here").read_objective(Source(Path(), {"model_type": name}, ())).model
    fields = importlib.import_module(f"jaxlm.huggingface.{name}").FIELDS
    theirs = config.to_dict() | {"rope_theta": config.rope_parameters["rope_theta"]}
    assert {key: theirs[key] for _, (key, _) in fields.items()} == {
        key: getattr(model, ours) for ours, (key, _) in fields.items()}


@pytest.mark.parametrize("name", POST)
def test_names_of_the_class_and_of_older_files(name, pair, tmp_path):
    """Also of a fine-tuned model, which has a pooler."""
    theirs, folder, imported = pair(name)
    task = transformers.AutoModelForSequenceClassification.from_config(theirs.config)
    for model, kind in ((theirs, "masked"), (task, "task")):
        files = {form: Path(shutil.copytree(folder, tmp_path / f"{kind}_{form}")) for form in ("new", "class", "old")}
        model.save_pretrained(files["new"])
        model.save_pretrained(files["class"], save_original_format=False)
        model.save_pretrained(files["old"])
        file, prefix = files["old"] / "model.safetensors", {"nomic_bert": "bert.", "gte": "new."}[name]
        tensors = {key.replace(f"{name}.", prefix): value for key, value in load_file(file).items()}
        save_file(tensors, file)
        assert f"{name}.layers.2.self_attn.q_proj.weight" in load_file(files["class"] / "model.safetensors")
        assert any(key.startswith(prefix) for key in tensors)
        first, *others = (import_folder(path) for path in files.values())
        for other in others:
            assert other.objective.model == imported.objective.model and not other.fresh
            assert jax.tree.all(jax.tree.map(np.array_equal, first.params, other.params))


@pytest.mark.parametrize("name", POST)
def test_masks_are_filled_as_by_the_class(name, pair, tmp_path):
    imported, mask = pair(name).ours, SYMBOLS[name][0]["mask"]
    out = export_folder(tmp_path / "out", imported.objective, imported.params, imported.tokenizer, ModelCard())
    before, after = (transformers.AutoTokenizer.from_pretrained(path) for path in (pair(name).folder, out))
    texts = [f"the cat {mask} on the mat", f"{mask} ran", f"under the {mask}, then it ran under the tree"]
    assert before(texts).data == after(texts).data and before(*texts[:2]).data == after(*texts[:2]).data
    assert ("token_type_ids" in after(texts).data) == (name == "nomic_bert")
    library = transformers.pipeline("fill-mask", model=str(out), tokenizer=str(out), top_k=3)
    for text, answers in zip(texts, fill_mask(imported, texts, 3), strict=True):
        np.testing.assert_allclose([p for _, p in answers[0]], [each["score"] for each in library(text)], atol=1e-5)


@pytest.mark.slow  # the suite has the loss and gradients of one step
@pytest.mark.parametrize("name", POST)
def test_twenty_steps_as_in_pytorch(name, tmp_path):
    theirs = save(name, tmp_path).train()
    imported, steps, count = import_folder(tmp_path), 20, 8
    objective = imported.objective.bind(imported.tokenizer.vocabulary, LENGTH)
    optimizer, mesh = OptimizerConfig(learning_rate=3e-3, warmup_steps=5), make_mesh(MeshConfig(), jax.devices()[:1])
    program = Program(objective, TrainConfig(steps=steps, batch_size=count, seed=3), optimizer, mesh)
    state = program.init_state(jax.tree.map(jnp.asarray, imported.params))
    # The names of the class, in which its parameters are.
    family = family_of(objective)
    table = family.stored_models(objective, Source(tmp_path, {}, dict(theirs.named_parameters())))[0].table
    entries = [dataclasses.replace(entry, theirs=entry.theirs.replace("lm_head.norm", "lm_head.layer_norm"))
               for entry in table.entries]
    table = dataclasses.replace(table, entries=tuple(entries))
    adamw, ours, reference = TorchAdamW(theirs, table, state.params, optimizer, steps), [], []
    corrupt = jax.jit(objective.corrupt)
    for step in range(steps):
        given = test_modernbert.rows(objective.vocabulary, objective.row_format(LENGTH).length, count, step)
        loss = test_modernbert.torch_loss(theirs, corrupt(corruption_key(3, step), given))
        adamw.step(loss)
        reference.append(loss.item())
        state, terms = program.train_step(state, given, ())
        ours.append(float(terms["loss"].total))
    assert reference[0] - min(reference) > 0.1, "the model learns, or the comparison says little"
    np.testing.assert_allclose(ours, reference, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("types", "pair_of_texts"), [(0, "cls $A sep sep $B sep"), (1, "cls $A sep sep $B sep"),
                                                      (2, "cls $A sep $B:1 sep:1")])
def test_segment_types_of_gte(types, pair_of_texts, tmp_path):
    """None in gte-base-en, one in the multilingual models, BERT's two in gte-large-en."""
    theirs = save("gte", tmp_path, type_vocab_size=types)
    imported = import_folder(tmp_path)
    assert imported.objective.model.template.pair == pair_of_texts
    given = example(False, types or 1)
    (_, logits), _ = forward_and_backward(imported.objective, imported.params, given)
    assert difference(logits, torch_loss(theirs, False)[1]) < TOLERANCE
