"""Training of vocabularies: layout of ids, reproducibility, unusual text, refusals."""

import functools
import os
import random
import re
import subprocess
import sys
import unicodedata
from typing import get_args

import numpy as np
import pytest
import tokenizers
from transformers import AutoTokenizer

from jaxlm.errors import UserError
from jaxlm.tokenizers import sentencepiece_json, training
from jaxlm.tokenizers.export import export
from jaxlm.tokenizers.normalizer import normalize
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.training import Kind, _chunks, train_tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from tests.tokenizers.templates import GPT2


def _texts(count: int = 400) -> list[str]:
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 8))) for _ in range(400)]
    return [" ".join(draw.choices(words, [1 / (r + 1) for r in range(400)], k=50)) for _ in range(count)]


def _pieces(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.piece(i) for i in range(len(tokenizer))]


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_layout_is_that_of_the_stand_in(kind, tmp_path):
    tokenizer = train_tokenizer(_texts(), tmp_path / "t", kind=kind, vocab_size=700)
    got, wanted = tokenizer.vocabulary, Vocabulary.stand_in(700)
    for name in ("size", "pad", "unk", "bos", "eos", "cls", "sep", "mask", "sentinel", "num_sentinels"):
        assert getattr(got, name) == getattr(wanted, name), name
    np.testing.assert_array_equal(got.special, wanted.special)
    assert got.random_ids == wanted.random_ids == (107, 700)  # text alone
    assert tokenizer.piece(got.sentinel) == "<extra_id_0>" and tokenizer.piece(got.sentinel - 99) == "<extra_id_99>"
    assert _pieces(tokenizer)[107:363] == [f"<0x{byte:02X}>" for byte in range(256)]
    assert len(set(_pieces(tokenizer))) == 700
    assert max(map(len, _pieces(tokenizer)[363:])) > 2


@pytest.mark.parametrize("kind", ["unigram", "bpe", "byte-bpe"])
def test_the_same_text_gives_the_same_bytes_quietly(kind, tmp_path, capfd):
    for name in ("a", "b"):
        train_tokenizer(iter(_texts()), tmp_path / name, kind=kind, vocab_size=600)
    files = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    assert files == {file.name: file.read_bytes() for file in (tmp_path / "b").iterdir()}
    assert set(files) == {"tokenizer.json" if kind == "byte-bpe" else "spiece.model", "jaxlm_tokenizer.json"}
    assert capfd.readouterr() == ("", "")


def test_a_vocabulary_of_bytes(tmp_path):
    """In google/reformer-enwik8 the id of a byte is its value plus 2."""
    tokenizer = train_tokenizer(["any"], tmp_path / "t", kind="bytes", vocab_size=258, normalization="identity")
    for text in ("Aé 🙂\n  x", "", " </s>", "\0\x7f"):
        assert tokenizer.encode(text) == [byte + 2 for byte in text.encode()]
        assert tokenizer.decode(tokenizer.encode(text)) == text
    vocabulary = tokenizer.vocabulary
    assert (vocabulary.size, vocabulary.pad, vocabulary.eos, vocabulary.unk) == (258, 0, 1, -1)
    assert tokenizer.encode_with_symbols("a</s>") == [ord("a") + 2, 1]
    more = train_tokenizer(["any"], tmp_path / "more", kind="bytes", vocab_size=259, symbols=["[R]"])
    assert more.vocabulary.id("[R]") == 258


def test_unigram_scores_sum_without_rounding(tmp_path):
    train_tokenizer(_texts(), tmp_path / "t", vocab_size=700)
    proto = sentencepiece_json.parse((tmp_path / "t" / "spiece.model").read_bytes())
    scores = [np.float32(piece.score) for piece in proto.pieces if piece.type == 1]
    worst = (10 - min(scores)) * sentencepiece_json.EXACT
    step = 2.0 ** np.ceil(np.log2(worst)) / 2**24
    assert all(float(score / step).is_integer() for score in scores)
    assert len(set(scores)) > 100


def test_byte_bpe_has_the_layout_of_roberta(tmp_path):
    tokenizer = train_tokenizer(_texts(), tmp_path / "t", kind="byte-bpe", vocab_size=700, symbols=("[R]", "<mask>"))
    v, pieces = tokenizer.vocabulary, _pieces(tokenizer)
    assert pieces[:4] == ["<s>", "<pad>", "</s>", "<unk>"]
    assert pieces[-3:] == ["<extra_id_0>", "[R]", "<mask>"] and pieces[-102] == "<extra_id_99>"
    assert (v.size, v.bos, v.pad, v.eos, v.unk, v.mask, v.cls, v.sep) == (700, 0, 1, 2, 3, 699, 0, 2)
    assert (v.sentinel, v.num_sentinels, v.id("[R]"), v.id("<mask>")) == (697, 100, 698, 699)
    assert np.flatnonzero(v.special).tolist() == [0, 1, 2, *range(598, 700)] and v.random_ids == (4, 598)
    text = "x<s>y [MASK]ab<mask> <extra_id_0>q\0\x01 \u2585z k\tm\tn\n\nagain"
    assert tokenizer.decode(tokenizer.encode(text)) == normalize(text)
    assert not v.special[tokenizer.encode(text)].any()


def test_byte_bpe_equals_the_trainer_of_the_library(tmp_path):
    """ByteLevelBPETokenizer is the published way to train one for RoBERTa."""
    tokenizer = train_tokenizer(_texts(), tmp_path / "t", kind="byte-bpe", vocab_size=700)
    peer = tokenizers.ByteLevelBPETokenizer()
    first = ["<s>", "<pad>", "</s>", "<unk>"]
    peer.train_from_iterator(_texts(), vocab_size=700 - 101, special_tokens=first, show_progress=False)
    text = " ".join(_texts(3)) + " 안녕 été"
    assert tokenizer.encode(text) == peer.encode(text).ids
    assert _pieces(tokenizer)[:599] == [peer.id_to_token(number) for number in range(599)]


def test_byte_bpe_keeps_marks_and_joiners_with_their_letters(tmp_path):
    """GPT-2's own words end before each, so that no piece could have one; an export and its import cut the same."""
    words = ["हिन्दी", "தமிழ்", "ශ්\u200dරී", "ที่นี่", "ру\u0301сский", "❤\ufe0f", "abc"]
    texts = ["".join(f" {word}" for word in words)] * 50
    tokenizer = train_tokenizer(texts, tmp_path / "t", kind="byte-bpe", vocab_size=2000)
    assert [len(tokenizer.encode(" " + word)) for word in words] == [1] * len(words)
    assert tokenizer.pieces(tokenizer.encode(" हिन्दी தமிழ்")) == ["▁हिन्दी", "▁தமிழ்"]
    assert tokenizer.vocabulary.word_start[tokenizer.encode(" हिन्दीதமிழ்")].tolist()[:2] == [True, False]
    export(tokenizer, tmp_path / "export", GPT2, 128)
    peer, again = AutoTokenizer.from_pretrained(tmp_path / "export"), Tokenizer.load(tmp_path / "export")
    for text in (*words, texts[0], "की हिन्दी, 12हि!ं I've \u093f❤\ufe0fab \u200d", "\n  ".join(words)):
        (ids, offsets), found = *tokenizer.encode_with_offsets([text]), peer(text, return_offsets_mapping=True)
        assert found["input_ids"] == ids.tolist() == again.encode(text) == tokenizer.encode(text)
        assert found["offset_mapping"] == [tuple(pair) for pair in offsets.tolist()]
        assert peer.decode(found["input_ids"]) == tokenizer.decode(ids) == normalize(text)


TRAIN = """
import sys
from jaxlm.tokenizers.training import train_tokenizer
from tests.tokenizers.test_training import _texts
print(train_tokenizer(_texts(), sys.argv[1], kind="byte-bpe", vocab_size=700).fingerprint)
"""


@pytest.mark.slow
def test_byte_bpe_does_not_depend_on_the_threads(tmp_path):
    found = {
        subprocess.run(
            [sys.executable, "-c", TRAIN, str(tmp_path / threads)], env=os.environ | {"RAYON_NUM_THREADS": threads},
            capture_output=True, text=True, check=True,
        ).stdout
        for threads in ("1", "3")
    }
    assert len(found) == 1


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_special_tokens_of_an_objective_follow_the_sentinels(kind, tmp_path):
    tokenizer = train_tokenizer(_texts(), tmp_path / "t", kind=kind, vocab_size=600, symbols=("[R]", "</s>", "[S]"))
    got, wanted = tokenizer.vocabulary, Vocabulary.stand_in(600, ("[R]", "[S]"))
    assert got.symbols == wanted.symbols and got.id("[S]") == 108
    np.testing.assert_array_equal(got.special, wanted.special)
    assert not got.special[tokenizer.encode("a [R] b")].any()
    assert got.id("[R]") in tokenizer.encode_with_symbols("a [R] b")
    with pytest.raises(UserError, match=r"no special token \[X\]"):
        got.id("[X]")


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_special_tokens_and_control_characters_make_no_pieces(kind, tmp_path):
    odd = "x<s>y [MASK]ab<0x0A> <extra_id_0>q\0\x01 \u2585z \ud800k\tm\tn"
    texts = [odd, *_texts()] * 20
    tokenizer = train_tokenizer(texts, tmp_path / "t", kind=kind, vocab_size=600)
    assert not [piece for piece in _pieces(tokenizer)[363:] if re.search("[\t\n\0\u2585]|<s>|MASK|extra|0x", piece)]
    text = odd.replace("\ud800", "")
    assert tokenizer.decode(tokenizer.encode(text)) == normalize(text)
    assert not tokenizer.vocabulary.special[tokenizer.encode(text)].any()


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_alphabet(kind, tmp_path):
    """All of ASCII, even if the text has little of it, and the characters that cover 99.95 % of the text."""
    draw = random.Random(2)
    words = ["".join(draw.choices("가나다라마바", k=draw.randint(1, 4))) for _ in range(40)]
    texts = [" ".join(draw.choices(words, k=900)) + " 漢" for _ in range(20)]
    tokenizer = train_tokenizer(texts, tmp_path / "t", kind=kind, vocab_size=475)
    pieces = set(_pieces(tokenizer))
    assert {chr(code) for code in range(33, 127)} | set("▁가나다라마바") <= pieces
    assert "漢" not in pieces
    tabs = train_tokenizer([text + "\t" * 90 for text in texts], tmp_path / "tabs", kind=kind, vocab_size=475)
    assert "漢" not in _pieces(tabs)
    more = train_tokenizer([text + " 漢" * 5 for text in texts], tmp_path / "more", kind=kind, vocab_size=475)
    assert "漢" in _pieces(more)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("mark", "۔։።፧။។།।.")
def test_the_mark_that_ends_a_sentence_is_a_piece(mark, kind, tmp_path):
    """Some are as letters of their script to SentencePiece, so that the most frequent last words had one."""
    firsts = {"।": 0x915, "۔": 0x628, "။": 0x1000, "។": 0x1780, "።": 0x1200, "፧": 0x1200, "։": 0x561, "།": 0xF49}
    first = firsts.get(mark, ord("a"))
    composed = filter(functools.partial(unicodedata.is_normalized, "NFKC"), map(chr, range(first, first + 30)))
    draw, letters = random.Random(3), [*filter(str.isalpha, composed)][:18]
    words = ["".join(draw.choices(letters, k=4)) for _ in range(100)]
    texts = [" ".join([*draw.choices(words, k=8), words[0] + mark]) for _ in range(300)]
    tokenizer = train_tokenizer(texts, tmp_path / "t", kind=kind, vocab_size=600)
    ids = tokenizer.encode(texts[0])
    assert tokenizer.vocabulary.sentence_end[ids].tolist() == [False] * (len(ids) - 1) + [True]
    assert tokenizer.pieces(ids)[-2:] == ["▁" + words[0], mark]
    assert tokenizer.decode(ids) == texts[0]


SMILES = ["".join(random.Random(i).choices(["C", "c1ccccc1", "N", "(=O)", "[nH]", "Cl"], k=12)) for i in range(200)]


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("texts", [SMILES, ["hello world, hello again"] * 100, ["我们在北京的天安门广场"], ["a"]])
def test_a_vocabulary_is_as_large_as_the_text_allows(kind, texts, tmp_path, capfd):
    """The least size that a refusal names is accepted, and so is every larger one."""
    with pytest.raises(UserError, match=r"of 1 is too small .*; set --data.vocab-size to \d+ or more, ") as error:
        train_tokenizer(texts, tmp_path / "t", kind=kind, vocab_size=1)
    least, named = (int(re.search(words, str(error.value))[1]) for words in (r"with (\d+)\.", r"to (\d+) or"))
    assert named == 2 * least
    with pytest.raises(UserError, match=rf"{least - 1} is too small for the {least} "):
        train_tokenizer(texts, tmp_path / "t", kind=kind, vocab_size=least - 1)
    assert not (tmp_path / "t").exists()
    sizes = {}
    for size in (least, least + 5, 8000):
        tokenizer = train_tokenizer(texts, tmp_path / str(size), kind=kind, vocab_size=size)
        sizes[size] = len(tokenizer)
        if kind != "words":
            assert tokenizer.decode(tokenizer.encode(texts[0])) == texts[0]
        assert len(set(_pieces(tokenizer))) == len(tokenizer)
    again = train_tokenizer(texts, tmp_path / "again", kind=kind, vocab_size=8000)
    assert again.fingerprint == tokenizer.fingerprint and f"{len(again)}" in repr(again)
    assert sizes[least] == least <= sizes[least + 5] <= least + 5 and sizes[least + 5] <= sizes[8000] < 8000
    assert capfd.readouterr() == ("", "")


def test_refusals(tmp_path):
    for texts in ([], ["", " \n\t\n"], ["\0\0"]):
        with pytest.raises(UserError, match="no text"):
            train_tokenizer(texts, tmp_path / "t")
    with pytest.raises(UserError, match=r"'word' has no brackets; write it like \[R\] or <r>"):
        train_tokenizer(_texts(), tmp_path / "t", symbols=("[R]", "word"))
    train_tokenizer(_texts(), tmp_path / "t", kind="bpe", vocab_size=500)
    with pytest.raises(UserError, match="another tokenizer"):
        train_tokenizer(_texts(), tmp_path / "t", kind="bpe", vocab_size=501)


def test_long_lines_are_cut_and_nothing_is_lost():
    text = " ".join(_texts(100)) + "\n" + "x" * 10_000 + " y\n\n  indented"
    lines = list(_chunks([text], keep_lines=False))
    assert max(map(len, lines)) <= 2048
    assert "".join(lines).replace(" ", "") == text.replace(" ", "").replace("\n", "")
    assert lines[-1] == "  indented"
    words = set(text.replace("x" * 10_000, "").split())
    assert all(set(line.split()) <= words for line in lines if "xx" not in line)
    assert "".join(_chunks([text], keep_lines=True)) == text


def test_words_by_frequency(tmp_path):
    """Words and punctuation marks follow the special tokens, the most frequent first; all others are [UNK]."""
    tokenizer = train_tokenizer(["b a, b c\nb a, d"], tmp_path / "words", kind="words", vocab_size=111)
    v = tokenizer.vocabulary
    assert v.pieces[107:] == ("b", ",", "a", "c") and v.word_start[107:].all()
    assert np.flatnonzero(v.word_start[:107]).tolist() == [v.unk]
    assert tokenizer.encode("d b,a [MASK]")[:4] == [v.unk, 107, 108, 109]
    assert tokenizer.encode_with_symbols("b [MASK] a") == [107, v.mask, 109]
    assert tokenizer.decode([107, 109]) == "b a"
    assert Tokenizer.load(tmp_path / "words") == tokenizer


def test_rare_words_are_dropped_while_words_are_counted(monkeypatch):
    monkeypatch.setattr(training, "MOST_WORDS", 3)
    texts = ["a a a b b c", "d", "e b a", "c d e f f f f"]
    # The second text drops words with a count of 1, the fourth those with 2 as well.
    assert training.count_words(texts, "identity") == {"a": 4, "b": 3, "f": 4}
