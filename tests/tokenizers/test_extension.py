"""Words of a new text in every kind of vocabulary."""

from __future__ import annotations

import collections
import itertools
import random

import pytest
import tokenizers

from jaxlm.errors import UserError
from jaxlm.tokenizers.extension import MIN_COUNT, WordModel, changed_share, extend_tokenizer
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.training import train_tokenizer

KINDS = ("wordpiece", "unigram", "bpe", "byte-bpe")


def word(draw: random.Random, syllables: int) -> str:
    return "".join(draw.choice("bdfgklmnprst") + draw.choice("aeiou") for _ in range(syllables))


def texts(seed: int, syllables: int, count: int = 400) -> list[str]:
    """Lines of words with the Zipf distribution of a small language, some of them compounds, with punctuation."""
    draw = random.Random(seed)
    words = [word(draw, draw.randint(1, syllables)) for _ in range(120)]
    words += [a + b for a, b in itertools.pairwise(words[::4])] + ["한국어", "naïve"] * (syllables > 3)
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    draw.shuffle(words)
    return [" ".join(draw.choices(words, weights, k=12)) + draw.choice([".", " (x)", ", 42"]) for _ in range(count)]


OLD, NEW = texts(0, 3), texts(1, 5)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param != "wordpiece":
        return train_tokenizer(OLD, folder, kind=request.param, vocab_size=600)
    model = tokenizers.BertWordPieceTokenizer(strip_accents=False)
    model.train_from_iterator(OLD, vocab_size=200, min_frequency=1, show_progress=False)
    model.save_model(str(folder))
    return Tokenizer.load(folder / "vocab.txt")


def test_the_most_expensive_words_become_one_piece(tokenizer):
    old = WordModel(tokenizer)
    counts = old.count(NEW)
    extension = extend_tokenizer(tokenizer, counts, 40)
    new = WordModel(extension.tokenizer)
    assert len(extension.words) == 40
    for added in extension.words:
        assert len(old.pieces(added)[1]) > 1 == len(new.pieces(added)[1]), added
    costs = {w: n * (len(old.pieces(w)[1]) - 1) for w, n in counts.items()}
    least = min(costs[w] for w in extension.words)
    # A word that costs more and was left out has [UNK], or in a BPE characters spelled in bytes.
    for left_out in {w for w, cost in costs.items() if cost > least and counts[w] >= MIN_COUNT} - {*extension.words}:
        assert any(piece.startswith("<0x") or piece not in tokenizer.vocabulary.pieces or piece == "[UNK]"
                   for piece in old.pieces(left_out)[0]), left_out
    assert new.mean_pieces(counts) < 0.9 * old.mean_pieces(counts)


def test_old_ids_stay_and_text_comes_back(tokenizer):
    extension = extend_tokenizer(tokenizer, WordModel(tokenizer).count(NEW), 40)
    size, pieces = len(tokenizer), extension.tokenizer.vocabulary.pieces
    assert pieces[:size] == tokenizer.vocabulary.pieces
    assert len(pieces) == size + len(extension.pieces) and {*extension.words} <= {*pieces[size:]}
    assert all(len(ids) > 1 and max(ids) < size for ids in extension.pieces)
    assert extension.tokenizer.vocabulary.symbols == tokenizer.vocabulary.symbols
    for text in [*NEW[:100], *OLD[:100]]:
        assert extension.tokenizer.decode(extension.tokenizer.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    ids = collections.Counter(itertools.chain.from_iterable(map(extension.tokenizer.encode, NEW)))
    assert sum(ids[pieces.index(added)] > 0 for added in extension.words) > 36


def test_old_words_change_only_by_new_ones(tokenizer):
    """The merges of a BPE and the scores of a unigram model leave alone what holds no new piece; so does WordPiece."""
    old = WordModel(tokenizer)
    extension = extend_tokenizer(tokenizer, old.count(NEW), 40)
    new, size = WordModel(extension.tokenizer), len(tokenizer)
    counts = old.count([*OLD, *NEW])
    changed = {w for w in counts if old.pieces(w)[1] != new.pieces(w)[1]}
    assert all(max(new.pieces(w)[1]) >= size for w in changed)
    share = sum(counts[w] for w in changed) / counts.total()
    assert changed_share(old, new, counts) == pytest.approx(share) and 0 < share < 0.6
    assert changed_share(old, old, counts) == 0


def test_a_piece_of_a_bpe_without_its_merges_is_never_used(tmp_path):
    """Why words bring their merges, and the pieces in between."""
    tokenizer = train_tokenizer(OLD, tmp_path, kind="byte-bpe", vocab_size=600)
    extension = extend_tokenizer(tokenizer, WordModel(tokenizer).count(NEW), 40)
    content = extension.tokenizer.to_json()
    assert len(content["model"]["merges"]) >= len(tokenizer.to_json()["model"]["merges"]) + len(extension.pieces)
    assert len(extension.pieces) > len(extension.words)
    content["model"]["merges"] = tokenizer.to_json()["model"]["merges"]
    model = WordModel(tokenizer.with_json(content))
    assert all(len(model.pieces(added)[1]) > 1 for added in extension.words)


def test_unigram_words_of_unknown_characters(tmp_path):
    """Their characters were spelled in bytes: nine of them for three syllables."""
    tokenizer = train_tokenizer(OLD, tmp_path, vocab_size=600)
    counts = {"▁한국어": 9, "▁나라말": 9}
    extension = extend_tokenizer(tokenizer, counts, 2)
    assert [len(ids) for ids in extension.pieces] == [10, 10]
    size = len(tokenizer)
    assert extension.tokenizer.encode("한국어 나라말") == [size + extension.words.index(word) for word in counts]


def test_unigram_keeps_the_ids_of_added_tokens(tmp_path):
    """They stand after the model's own list of pieces."""
    tokenizer = train_tokenizer(OLD, tmp_path, vocab_size=600).with_symbols(["[R]", "<new>"])
    extension = extend_tokenizer(tokenizer, WordModel(tokenizer).count(NEW), 5)
    assert extension.tokenizer.vocabulary.symbols == tokenizer.vocabulary.symbols
    assert extension.tokenizer.to_json()["model"]["vocab"][len(tokenizer) - 1][0] == "<new>"
    text = f"[R] <new> {NEW[0]}"
    assert not {tokenizer.vocabulary.id("[R]"), tokenizer.vocabulary.id("<new>")} & {*extension.tokenizer.encode(text)}
    assert tokenizer.vocabulary.id("[R]") in extension.tokenizer.encode_with_symbols(text)


@pytest.mark.parametrize("kind", ["words", "bytes"])
def test_vocabularies_without_pieces_are_refused(kind, tmp_path):
    tokenizer = train_tokenizer(OLD, tmp_path, kind=kind, vocab_size=600)
    with pytest.raises(UserError, match="whole words or bytes and no pieces of words, so it cannot be extended"):
        extend_tokenizer(tokenizer, WordModel(tokenizer).count(NEW), 40)


def test_a_text_without_new_words_is_refused(tokenizer):
    with pytest.raises(UserError, match="no word of several pieces that occurs 5 times"):
        extend_tokenizer(tokenizer, WordModel(tokenizer).count(NEW[:1]), 40)


def test_words_of_a_bpe_that_marks_their_ends(tmp_path):
    """GPT-1's: a merge of the last piece carries the mark."""
    model = tokenizers.CharBPETokenizer()
    model.train_from_iterator(OLD, vocab_size=200, show_progress=False)
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    extension = extend_tokenizer(tokenizer, WordModel(tokenizer).count(NEW), 40)
    assert len(extension.words) == 40 < len(extension.pieces)
    for added in extension.words:
        assert added.endswith("</w>")
        assert len(extension.tokenizer.encode(added.removesuffix("</w>"))) == 1, added
