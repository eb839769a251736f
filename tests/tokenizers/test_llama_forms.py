"""Tokenizers in the forms of Llama 2 and 3, Qwen, SmolLM2, Gemma and mmBERT: ids of AutoTokenizer, also of exports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxlm.data.labelled import Record
from jaxlm.models.bert import Bert
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.llama import Llama
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.tasks.tagging import Tagging
from jaxlm.tokenizers.export import export
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.training import train_tokenizer
from tests.params import random_params

WORDS = [
    "the", "cat's", "they'LL", "transcendental", "1234567", "3.14", "x==y", "\tif", "고양이가", "옛날에", "кошка",
    "сидела", "猫坐在垫子上", "東京タワー", "बिल्ली", "कि", "القطة", "جَلَسَ", "แมวนั่ง", "é", "ﬁ", "Å",
    "🙂👍🏽", "\u00a0", "  ", "…", "\n\n",
]
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
          r"\s+(?!\S)|\s+")
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def by_bytes(regex: str = "") -> pre_tokenizers.PreTokenizer:
    """Return GPT-2's alphabet of bytes, in words of a regular expression or with single digits."""
    if not regex:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    split = pre_tokenizers.Split(Regex(regex), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


SPACES = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
# Model, normalizer, pre-tokenizer, class, begin and end symbol, and whether texts have the begin symbol; mmBERT's texts
# also have the end symbol, and it has a mask.
FORMS = {
    "llama3": (dict(ignore_merges=True), None, by_bytes(LLAMA3), "PreTrainedTokenizerFast", "<|begin_of_text|>",
               "<|end_of_text|>", True),
    "qwen3": ({}, normalizers.NFC(), by_bytes(QWEN), "Qwen2Tokenizer", None, "<|endoftext|>", False),
    "smollm2": ({}, None, by_bytes(), "GPT2Tokenizer", "<|endoftext|>", "<|endoftext|>", False),
    "llama2": (dict(byte_fallback=True, fuse_unk=True, unk_token="<unk>"), normalizers.Sequence(SPACES), None,
               "PreTrainedTokenizerFast", "<s>", "</s>", True),
    "gemma": (dict(byte_fallback=True, fuse_unk=True, unk_token="<unk>"), SPACES[1],
              pre_tokenizers.Split(" ", "merged_with_previous"), "GemmaTokenizer", "<bos>", "<eos>", True),
}
FORMS["mmbert"] = (*FORMS["gemma"][:3], "GemmaTokenizerFast", *FORMS["gemma"][4:])
MODEL_TYPES = {"qwen3": "qwen3", "gemma": "gemma3_text", "mmbert": "modernbert"}


def save(name: str, folder: Path, texts: Sequence[str] = [" ".join(WORDS[:12] * 3)] * 3) -> Path:
    """Save a tokenizer of this form, trained on the words; those without a pre-tokenizer merge across spaces."""
    options, normalizer, pre_tokenizer, cls, bos, eos, begins = FORMS[name]
    made = tokenizers.Tokenizer(models.BPE(**options))
    is_bytes = "byte_fallback" not in options
    special = list(dict.fromkeys(filter(None, ["<pad>", eos, bos, "<unk>"] if not is_bytes else [eos, bos])))
    special += ["<mask>"] * (name == "mmbert")
    special += [] if is_bytes else [f"<0x{byte:02X}>" for byte in range(256)]
    if normalizer is not None:
        made.normalizer = normalizer
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet() if is_bytes else ["▁"]
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=special, limit_alphabet=300,
                                  show_progress=False)
    made.train_from_iterator(texts, trainer)
    content = json.loads(made.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith("<0x")]
    made = tokenizers.Tokenizer.from_str(json.dumps(content))
    made.decoder = decoders.ByteLevel() if is_bytes else decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(" ", 1, 0)] if name == "llama2" else []))
    if begins:
        single, pair = f"{bos} $A", f"{bos} $A {bos} $B"
        if name == "mmbert":
            single, pair = f"{bos} $A {eos}", f"{bos} $A {eos} $B {eos}"
        made.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=[(symbol, made.token_to_id(symbol)) for symbol in {bos, eos}])
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": cls, "bos_token": bos, "eos_token": eos, "pad_token": eos if is_bytes else "<pad>"}
    settings |= {} if is_bytes else {"unk_token": "<unk>"}
    settings |= {"mask_token": "<mask>"} if name == "mmbert" else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": MODEL_TYPES.get(name, "llama")}))
    return folder


def lines() -> list[str]:
    """Return 500 lines of words of eight scripts; none begins with a space, which Llama 2's class alone would halve."""
    rng = np.random.default_rng(0)
    rows = [" ".join(rng.choice(WORDS, rng.integers(1, 9))) for _ in range(500)]
    return [row.strip(" ") or "a" for row in rows]


@pytest.mark.parametrize("name", FORMS)
def test_ids_offsets_and_text_of_500_lines(name, tmp_path):
    folder, texts = save(name, tmp_path / "theirs"), lines()
    ours, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert ours.vocabulary.eos == theirs.eos_token_id and ours.vocabulary.pad == theirs.pad_token_id
    assert ours.vocabulary.bos == (-1 if theirs.bos_token_id is None else theirs.bos_token_id)
    out = tmp_path / "out"
    export(ours, out, Llama().template, 512)
    (out / "config.json").write_text((folder / "config.json").read_text())
    exported = transformers.AutoTokenizer.from_pretrained(out)
    assert exported.padding_side == theirs.padding_side
    assert Tokenizer.load(out).vocabulary.bos == ours.vocabulary.bos
    found = ours.encode_with_offsets(texts)
    for tokenizer in (theirs, exported):
        expected = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        assert expected["input_ids"] == [ids.tolist() for ids, _ in found]
        assert [[list(pair) for pair in row] for row in expected["offset_mapping"]] == [x.tolist() for _, x in found]
        decoded = [tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids, _ in found]
        assert decoded == [ours.decode(ids) for ids, _ in found]
    assert len({tuple(ids) for ids, _ in found}) > 450


# Form, class, type and settings: LlamaTokenizer puts no symbol before a space, and Qwen2Tokenizer has a normalizer and
# an expression of its own, for the type qwen2 whatever class is named.
REBUILT = [
    ("llama2", "LlamaTokenizer", "llama", {}), ("llama2", "LlamaTokenizer", "llama", {"legacy": True}),
    ("llama2", "LlamaTokenizerFast", "llama", {"add_prefix_space": False}), ("llama2", None, "llama", {}),
    ("llama2", "LlamaTokenizer", "mistral", {}), ("llama3", "LlamaTokenizer", "llama", {}),
    ("llama3", "PreTrainedTokenizerFast", "qwen2", {}), ("llama3", "PreTrainedTokenizerFast", "qwen3", {}),
    ("llama3", None, "qwen3", {}), ("smollm2", "TokenizersBackend", "qwen2", {}),
    ("qwen3", "Qwen2TokenizerFast", "qwen2", {}),
]


@pytest.mark.parametrize(("name", "cls", "model_type", "others"), REBUILT)
def test_classes_with_parts_of_their_own(name, cls, model_type, others, tmp_path):
    """Also texts that begin with a space, runs of digits, and marks that NFC composes."""
    folder, out = save(name, tmp_path / "theirs"), tmp_path / "out"
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | others
    del settings["tokenizer_class"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | ({"tokenizer_class": cls} if cls else {})))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    texts = [*lines()[:100], " the", "   the cat's", " ", "they 12 1234567", "e\u0301 a\u030a", "x \n the"]
    ours, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    export(ours, out, Llama().template, 512)
    (out / "config.json").write_text(json.dumps({"model_type": "llama"}))
    found = [list(ours.encode(text)) for text in texts]
    for tokenizer in (theirs, transformers.AutoTokenizer.from_pretrained(out)):
        assert tokenizer(texts, add_special_tokens=False)["input_ids"] == found
        assert tokenizer.padding_side == theirs.padding_side


@pytest.mark.parametrize("name", FORMS)
def test_a_mask_symbol_and_its_place_in_texts(name, tmp_path):
    """As a decoder becomes an encoder: the begin symbol, or the end symbol where there is none, the text, the end."""
    folder = save(name, tmp_path / "theirs")
    ours, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    model = Llama(vocab_size=len(ours), hidden_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8,
                  intermediate_size=8)
    objective = CausalLM(model=model).bind(ours.vocabulary, 16)
    found = PretrainedModel(objective, random_params(objective), ours).in_direction(False)
    v, model = found.tokenizer.vocabulary, found.objective.model
    begin = theirs.eos_token_id if theirs.bos_token_id is None else theirs.bos_token_id
    mask = len(ours) if theirs.mask_token_id is None else theirs.mask_token_id
    assert (v.cls, v.sep, v.mask, v.size) == (begin, theirs.eos_token_id, mask, max(mask + 1, len(ours)))
    assert jax.tree.map(np.shape, found.params) == jax.tree.map(np.shape, jax.eval_shape(model.init, jax.random.key(0)))
    export(found.tokenizer, tmp_path / "out", model.template.for_vocabulary(v), 512)
    (tmp_path / "out" / "config.json").write_text(json.dumps({"model_type": "eurobert"}))
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert exported.mask_token_id == v.mask
    for text in ("the [MASK] cat's", "[MASK]", "they'LL[MASK] if"):
        text = text.replace("[MASK]", exported.mask_token)
        ids = exported(text)["input_ids"]
        assert ids == [v.cls, *found.tokenizer.encode_with_symbols(text), v.sep] and ids.count(v.mask) == 1
        before = theirs.encode(text.partition(exported.mask_token)[0].rstrip(" "), add_special_tokens=False)
        if theirs.mask_token is None:  # the new one takes the space; another keeps its own rule
            assert ids[1 : ids.index(v.mask)] == before


@pytest.mark.parametrize("name", ["gemma", "mmbert", "llama2", "llama3", "unigram", "bpe", "byte-bpe", "wordpiece"])
def test_words_to_tag_have_the_ids_of_running_text(name, tmp_path):
    """Each word but the first has its space, where the vocabulary does not begin the first with one, too."""
    folder, words = tmp_path / "made", ["cat", "hen", "thecat", *(word for word in WORDS[:12] if word.isalpha())]
    if name in FORMS:  # published vocabularies have no piece across words
        save(name, folder, [*WORDS, *(f" {word}" for word in WORDS)] * 3)
    else:
        if name == "wordpiece":
            pieces = sorted({part for word in words for part in (*word, *(f"##{letter}" for letter in word))})
            (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]))
            made = Tokenizer.load(tmp_path / "vocab.txt")
        else:
            made = train_tokenizer(lines(), tmp_path / "trained", kind=name, vocab_size=700)
        export(made, folder, Bert().template, 100)
    ours, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    task = Tagging(model=Gpt2(), labels=("O",)).bind_unchecked(ours.vocabulary)
    row = Record("0", "here", {"words": words, "tags": ["O"] * len(words)}, ())
    (example,) = task.encode([row], ours, 500)
    found = [i for i in example.arrays["input_ids"].tolist() if not ours.vocabulary.special[i]]
    assert found == theirs(" ".join(words), add_special_tokens=False)["input_ids"]
    assert len(found) > (example.arrays["labels"] >= 0).sum() == len(words) > 8
