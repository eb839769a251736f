"""Published models word by word: the ids are those of the whole text."""

import io
import random

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlm.tokenizers import sentencepiece_json, words
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.words import longest_text
from tests.params import first_fast
from tests.tokenizers.test_sentencepiece import BPE, BYTES, IDENTITY, KEEP, NAMES, NO_PREFIX, ODD, SPACE, USER

SCRIPTS = [
    "the cat sat on the mat, aaa aaaa! e.g. 3,5 km – “quoted” l'été naïve straße",
    "мама мыла раму, а папа — нет; съешь ещё этих мягких французских булок",
    "η γάτα κάθισε στο χαλί· ποια είναι η ερώτησή σου;",
    "القطة جلست على السجادة، والسَّلامُ عليكم ورحمة الله",
    "החתול ישב על השטיח, שָׁלוֹם לכולם",
    "बिल्ली चटाई पर बैठी थी। क्या हाल है आपका",
    "แมว นั่ง บน เสื่อ ทำ อะไร อยู่",
    "고양이가 매트 위에 앉았다. 그리고 다시 일어났다",
    "猫が マット の上に 座った。 コーヒー を飲む",
    "猫 坐在 垫子上。 你好， 世界",
]
MORE = ["\u0301x", "x\u0301", "▁", "x▁", "▁x", "¨", "x´", "´x", "ﷺ", "\u0d4e", "ำ", "ﾞ", "\u200d", "\u200e", "🏽", "🇩🇪",
        "👩\u200d👩", "\uffff", "\ufeff", "\x00", "\ud800", "\ud83d\ude42", "-–£", "<s>", "a"]
SYMBOLS = {"user_defined_symbols": ["–", "(", "bage", "①"]}
BY_WORD = {
    "unigram": {}, "unigram bytes": BYTES, "unigram symbols": SYMBOLS, "unigram identity keep": IDENTITY | KEEP,
    "unigram nfkc_cf": {"normalization_rule_name": "nfkc_cf"}, "unigram keep": KEEP | BYTES, "bpe": BPE,
    "bpe bytes nfkc": BPE | BYTES | {"normalization_rule_name": "nfkc"},
}
WHOLE = {
    "bpe symbols": BPE | SYMBOLS, "no prefix": NO_PREFIX, "symbols across": {"user_defined_symbols": ["ba da"]},
    "symbol of spaces": {"user_defined_symbols": ["\t\t"]},
    "across words": {"split_by_whitespace": False},
}


def lines(count: int) -> list[str]:
    """Lines of the words of ten scripts, alone and together."""
    draw = random.Random(0)
    own = [script.split(" ") for script in SCRIPTS]
    own.append([word for script in own for word in script])
    return [" ".join(draw.choices(draw.choice(own), k=draw.randint(1, 12))) for _ in range(count)]


def load(folder, options) -> tuple[Tokenizer, object]:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines(2000)), model_writer=model, minloglevel=2, hard_vocab_limit=False,
        character_coverage=1.0, **{"vocab_size": 500} | options)
    (folder / "a.model").write_bytes(model.getvalue())
    return Tokenizer.load(folder / "a.model"), sentencepiece_json.parse(model.getvalue())


def check(tokenizer: Tokenizer, texts: list[str]) -> int:
    """Compare with the texts as a whole, and return how many were encoded as such."""
    whole, encode = [], tokenizer._words._encode
    tokenizer._words._encode = lambda given: whole.extend(given) or encode(given)
    found = tokenizer.encode_arrays(texts)
    tokenizer._words._encode = encode
    for text, ids, (expected, _) in zip(texts, found, tokenizer.encode_with_offsets(texts), strict=True):
        assert ids.tolist() == expected.tolist() and ids.dtype == np.int32, text
    return len(set(whole) & set(texts))


@pytest.mark.parametrize("name", first_fast(sorted(BY_WORD, reverse=True), 2))
def test_ids_are_those_of_the_text(name, tmp_path, monkeypatch):
    """600 lines of ten scripts, then odd ones; the words of the first are seen but once."""
    tokenizer, proto = load(tmp_path, BY_WORD[name])
    assert longest_text(proto) > 65536
    texts = [*lines(600), " ".join(lines(600)), "\n".join(lines(600))]
    assert check(tokenizer, texts) <= 20
    assert len(tokenizer._words._ids) < 700 and check(tokenizer, texts) <= 20
    odd = [*ODD, *SPACE, *NAMES, *USER, *MORE, "", *" ".join(SCRIPTS).split()]
    monkeypatch.setattr(words, "_NEW", 1e9)
    draw = random.Random(1)
    texts = [draw.choice(["", " "]).join(draw.choices(odd, k=draw.randint(0, 6))) for _ in range(1500)]
    assert 0 < check(tokenizer, texts) < len(set(texts)) - 100
    monkeypatch.setattr(words, "_KEPT", 100)

    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.lists(st.sampled_from(odd) | st.text(max_size=4), max_size=6).map(" ".join), max_size=8))
    def any_texts(texts):
        check(tokenizer, texts)

    any_texts()


@pytest.mark.parametrize("name", WHOLE)
def test_other_models_encode_whole_texts(name, tmp_path):
    tokenizer, proto = load(tmp_path, WHOLE[name])
    assert longest_text(proto) == 0 and check(tokenizer, lines(100)) > 90


def test_words_are_joined_up_to_the_length_of_a_text(tmp_path):
    tokenizer, _ = load(tmp_path, {})
    encoder = tokenizer._words
    encoder._longest = 50
    texts = [line[:50].strip() for line in lines(300)]
    assert check(tokenizer, texts) < 10 and len(encoder._ids) > 50, "in smaller groups"
    assert check(tokenizer, [*texts, texts[0] + " " * 50]) >= 1, "a longer one as a whole"


def test_scores_that_are_rounded(tmp_path):
    """With scores of many binary places, long texts are encoded as a whole."""
    _, proto = load(tmp_path, {})
    exact = longest_text(proto)
    next(piece for piece in proto.pieces if piece.score < -2).score = -(2.0**-20 + 2.0**-43)
    assert exact > 1e5 and longest_text(proto) < exact / 2**18
