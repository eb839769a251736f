"""Training: the layout of ids, repeatability, and what happens to text that cannot be trained on as it is."""

import random
import re

import numpy as np
import pytest

from jaxlm.errors import UserError
from jaxlm.tokenizers import sentencepiece_json
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.training import _lines, _sample, train_tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary


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
    assert tokenizer.piece(got.sentinel) == "<extra_id_0>" and tokenizer.piece(got.sentinel - 99) == "<extra_id_99>"
    assert _pieces(tokenizer)[107:363] == [f"<0x{byte:02X}>" for byte in range(256)]
    assert len(set(_pieces(tokenizer))) == 700
    assert max(map(len, _pieces(tokenizer)[363:])) > 2


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_the_same_text_gives_the_same_bytes_quietly(kind, tmp_path, capfd):
    for name in ("a", "b"):
        train_tokenizer(iter(_texts()), tmp_path / name, kind=kind, vocab_size=600)
    files = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    assert files == {file.name: file.read_bytes() for file in (tmp_path / "b").iterdir()}
    assert set(files) == {"spiece.model", "jaxlm_tokenizer.json"}
    assert capfd.readouterr() == ("", "")


def test_unigram_scores_sum_without_rounding(tmp_path):
    train_tokenizer(_texts(), tmp_path / "t", vocab_size=700)
    proto = sentencepiece_json.parse((tmp_path / "t" / "spiece.model").read_bytes())
    scores = [np.float32(piece.score) for piece in proto.pieces if piece.type == 1]
    worst = (10 - min(scores)) * sentencepiece_json.SEGMENT_LIMIT
    step = 2.0 ** np.ceil(np.log2(worst)) / 2**24
    assert all(float(score / step).is_integer() for score in scores)
    assert len(set(scores)) > 100


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_symbols_and_controls_in_the_text_make_no_pieces(kind, tmp_path):
    odd = "x<s>y [MASK]ab<0x0A> <extra_id_0>q\0\x01 \u2585z \ud800k\tm\tn"
    texts = [odd, *_texts()] * 20
    tokenizer = train_tokenizer(texts, tmp_path / "t", kind=kind, vocab_size=600)
    assert not [piece for piece in _pieces(tokenizer)[363:] if re.search("[\t\n\0\u2585]|<s>|MASK|extra|0x", piece)]
    text = odd.replace("\ud800", "")
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert not tokenizer.vocabulary.special[tokenizer.encode(text)].any()


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_alphabet(kind, tmp_path):
    """ASCII whole even if the text has little of it, and the frequent characters up to the coverage."""
    draw = random.Random(2)
    words = ["".join(draw.choices("가나다라마바", k=draw.randint(1, 4))) for _ in range(40)]
    texts = [" ".join(draw.choices(words, k=900)) + " 漢" for _ in range(20)]
    tokenizer = train_tokenizer(texts, tmp_path / "t", kind=kind, vocab_size=475)
    pieces = set(_pieces(tokenizer))
    assert {chr(code) for code in range(33, 127)} | set("▁가나다라마바") <= pieces
    assert "漢" not in pieces
    every = train_tokenizer(texts, tmp_path / "u", kind=kind, vocab_size=475, character_coverage=1.0)
    assert "漢" in _pieces(every)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_vocabulary_larger_than_the_text_supports(kind, tmp_path, capfd):
    texts = ["hello world, hello again"] * 100
    with pytest.raises(UserError, match="at most") as caught:
        train_tokenizer(texts, tmp_path / "t", kind=kind, vocab_size=8000)
    assert not (tmp_path / "t").exists()
    limit = int(re.search(r"at most (\d+)", str(caught.value))[1])
    assert len(train_tokenizer(texts, tmp_path / "t", kind=kind, vocab_size=limit)) == limit
    with pytest.raises(UserError, match="at most"):
        train_tokenizer(texts, tmp_path / "u", kind=kind, vocab_size=limit + 1)
    assert capfd.readouterr() == ("", "")


def test_mistakes(tmp_path):
    for texts in ([], ["", " \n\t\n"], ["\0\0"]):
        with pytest.raises(UserError, match="no text"):
            train_tokenizer(texts, tmp_path / "t")
    with pytest.raises(UserError, match="too small"):
        train_tokenizer(_texts(), tmp_path / "t", vocab_size=300)
    with pytest.raises(UserError, match="unigram or bpe"):
        train_tokenizer(_texts(), tmp_path / "t", kind="word")
    with pytest.raises(UserError, match="character_coverage"):
        train_tokenizer(_texts(), tmp_path / "t", character_coverage=0.5)
    train_tokenizer(_texts(), tmp_path / "t", kind="bpe", vocab_size=500)
    with pytest.raises(UserError, match="already"):
        train_tokenizer(_texts(), tmp_path / "t", kind="bpe", vocab_size=500)


def test_long_lines_are_cut_and_nothing_is_lost():
    text = " ".join(_texts(100)) + "\n" + "x" * 10_000 + " y\n\n  indented"
    lines = list(_lines([text]))
    assert max(map(len, lines)) <= 2048
    assert "".join(lines).replace(" ", "") == text.replace(" ", "").replace("\n", "")
    assert lines[-1] == "  indented"
    words = set(text.replace("x" * 10_000, "").split())
    assert all(set(line.split()) <= words for line in lines if "xx" not in line)


def test_sample_is_bounded_even_and_repeatable():
    lines = [f"{number:05d}é" for number in range(20_000)]
    kept = _sample(iter(lines), 14_000, seed=0)
    assert kept == _sample(iter(lines), 14_000, seed=0) != _sample(iter(lines), 14_000, seed=1)
    assert 3_500 < sum(len(line.encode()) for line in kept) <= 14_000
    assert kept == sorted(set(kept))
    assert abs(np.mean([int(line[:5]) for line in kept]) - 10_000) < 600  # three standard errors and more
    assert _sample(iter(lines), 1_000_000, seed=0) == lines
