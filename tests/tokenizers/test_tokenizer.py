"""Tokenizers against Transformers after an export, round trips of text, and word and sentence boundaries."""

import errno
import functools
import json
import pickle
import random
import tempfile
import unicodedata

import numpy as np
import pytest
import sentencepiece
import tokenizers
import transformers
from etils import epath
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxlm.errors import UserError
from jaxlm.tokenizers.export import export
from jaxlm.tokenizers.normalizer import NORMALIZERS, normalize
from jaxlm.tokenizers.tokenizer import Tokenizer, split_sentences
from jaxlm.tokenizers.training import train_tokenizer
from tests.tokenizers.templates import BERT, GPT2, ROBERTA, T5, Template

transformers.logging.set_verbosity_error()  # on texts longer than the model

NASTY = [
    "", " ", "\n", "\n\n\n", "  two  leading,   many inside, trailing  ",
    "line\n  indented\n\n\n\tlast\r\n", "\r", "\t\t a",
    "안녕하세요, 세계! 각 각", "👩‍👩‍👧 🏳️‍🌈 👍🏽 e", "\0 a\x01b\x7fc\x1b[0m",
    "no-break\u00a0space\u202f!", "ｆｕｌｌ　ｗｉｄｔｈ ﬁ ① ﷺ",
    "é e\u0301 e\u0301\u0301 \u0301 x", "\u200b\ufeffzero\u200dwidth",
    "x" * 3000, " " * 3000 + "y", "가" * 1500 + " " + "z" * 1025,
    "ab " * 2000, "------ ======== .... aaaaaaaaaaaa", "<0x0A> <0xE3> <extra_id_5 [MASK <unk", "İstanbul ß Ω ϐ",
    "``quoted''",
    "日本語のテキスト。漢字かな", "ends in newline\n", "\n starts", "\U0010ffff\ufffe\ufffd",
]


def _corpus() -> list[str]:
    """Return text of made-up languages, with the word frequencies and punctuation of real text."""
    draw = random.Random(0)
    syllables = [a + b for a in "bcdfghklmnprstv" for b in ("a", "e", "i", "o", "u", "an", "er", "ing")]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(1500)]
    korean = ["".join(chr(0xAC00 + 28 * draw.randrange(200)) for _ in range(draw.randint(1, 3))) for _ in range(300)]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    texts = []
    for number in range(400):
        line = draw.choices(words, weights, k=60)
        if number % 4 == 0:
            line += draw.choices(korean, k=20)
        texts.append(" ".join(line).capitalize() + ".\n    indented -- aaaa ==== " + str(draw.random()) + " é")
    return texts


CORPUS = _corpus()


def _any_text() -> st.SearchStrategy[str]:
    from_corpus = st.integers(0, 300).flatmap(lambda i: st.integers(0, 40).map(lambda n: CORPUS[i][n : 3 * n]))
    short = [text for text in NASTY if len(text) < 100]
    parts = st.one_of(
        from_corpus, st.text(max_size=8), st.sampled_from(short),
        st.text(" \n\t▁aA-=.é가\u0301", max_size=8),
    )
    return st.lists(parts, max_size=6).map("".join)


IDENTITY = ("unigram identity", "byte-bpe identity")


@functools.cache
def _trained(kind: str) -> Tokenizer:
    kind, _, normalization = kind.partition(" ")
    with tempfile.TemporaryDirectory() as folder:
        return train_tokenizer(
            CORPUS, folder + "/t", kind=kind, vocab_size=1200, normalization=normalization or "nmt_nfkc"
        )


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def trained(request) -> Tokenizer:
    """A tokenizer trained by SentencePiece."""
    return _trained(request.param)


@pytest.fixture(scope="module", params=["unigram", "bpe", "byte-bpe", *IDENTITY])
def any_trained(request) -> Tokenizer:
    return _trained(request.param)


def _write_wordpiece(folder) -> None:
    """Write a small vocabulary like that of bert-base-uncased."""
    letters = "abcdefghijklmnopqrstuvwxyzéß가나다0123456789.,-=!?[]<>'`"
    words = ["the", "##ing", "##er", "an", "ab", "##ba", "안녕", "##하"]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + c for c in letters), *words]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")


def _write_byte_bpe(folder) -> None:
    from tokenizers import ByteLevelBPETokenizer

    model = ByteLevelBPETokenizer()
    model.train_from_iterator(CORPUS, vocab_size=700, special_tokens=[], show_progress=False)
    model.save_model(str(folder))
    vocab = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(vocab | {"<|endoftext|>": len(vocab)}))


@pytest.fixture(scope="module", params=["wordpiece", "byte-bpe"])
def published(request, tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp(request.param)
    {"wordpiece": _write_wordpiece, "byte-bpe": _write_byte_bpe}[request.param](folder)
    return Tokenizer.load(folder)


def _has_symbol(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a symbol is spelled out in the text; [UNK] too, which Transformers reads as the symbol, jaxlm as text."""
    v = tokenizer.vocabulary
    return any(tokenizer.piece(i) in text for i in [*np.flatnonzero(v.special), *([v.unk] if v.unk >= 0 else [])])


def _agrees(tokenizer: Tokenizer, template: Template, folder) -> None:
    export(tokenizer, folder, template, 128)
    peer = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(peer) == tokenizer.vocabulary.size
    for text, ids in zip(NASTY, map(tokenizer.encode, NASTY), strict=True):
        assert peer(text, add_special_tokens=False)["input_ids"] == ids, text
        assert peer.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids), text

    @settings(max_examples=250, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(_any_text())
    def fuzz(text: str) -> None:
        if not _has_symbol(tokenizer, text):
            assert peer(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)

    fuzz()


def test_trained_equals_transformers(any_trained, tmp_path):
    _agrees(any_trained, BERT, tmp_path)


def test_published_forms_equal_transformers(published, tmp_path):
    _agrees(published, GPT2 if published.is_byte_level else BERT, tmp_path)


@settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(text=_any_text())
def test_round_trip_of_text(any_trained, text):
    wanted = text if any_trained in map(_trained, IDENTITY) else normalize(text)
    # U+2581 is SentencePiece's own sign for the space, and cannot be told from it.
    wanted = wanted if any_trained.is_byte_level else wanted.replace("▁", " ")
    assert any_trained.decode(any_trained.encode(text)) == wanted


@settings(max_examples=300, deadline=None, database=None)
@given(_any_text())
def test_normalization_is_that_of_the_export(text):
    steps = json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": [],
                        "normalizer": {"type": "Sequence", "normalizers": NORMALIZERS}})
    assert normalize(text) == tokenizers.Tokenizer.from_str(steps).normalizer.normalize_str(text)


def test_normalization_is_that_of_sentencepiece():
    """Single characters and whole words, except where Unicode has changed since the library was built."""
    theirs = sentencepiece.SentencePieceNormalizer(
        rule_name="nmt_nfkc", add_dummy_prefix=False, escape_whitespaces=False, remove_extra_whitespaces=False
    )
    # It keeps the full-width tilde, and joins what it takes for a letter and its accent.
    characters = {chr(code) for code in range(1, 0x10000) if not 0xD800 <= code < 0xE000} - set("\n\t\r～㋿")
    texts = [f"b{char}b" for char in characters if unicodedata.category(char) != "Cn" and char < "\ua000"]
    texts += [f"b{char}b" for char in characters if char >= "\uf900"]
    texts += [unicodedata.normalize("NFD", chr(code)) for code in range(0xAC00, 0xD7A4)]
    texts += ["Ａｌｌ　ｆｕｌｌ　ｗｉｄｔｈ！", "ﾊﾝｶｸ ｶﾞ", "e\u0301\x07 \u00a0x\x0c", "a\x01\x02\ufeffb"]
    texts += [unicodedata.normalize("NFD", "ガぽ ế ǖ ñ")]
    assert [(t, theirs.normalize(t)) for t in texts if normalize(t) != theirs.normalize(t)] == []


@pytest.mark.parametrize("kind", ["unigram", "bpe", "byte-bpe"])
def test_decomposed_and_full_width_text_has_the_ids_of_plain_text(kind):
    plain = "안녕하세요 été ba DA 12, カガ!"
    for text in (unicodedata.normalize("NFD", plain), "".join(
        chr(ord(char) + 0xFEE0) if "!" <= char <= "~" else char for char in plain
    )):
        assert text != plain and _trained(kind).encode(text) == _trained(kind).encode(plain)
    assert _trained("unigram identity").encode(unicodedata.normalize("NFD", "é")) != _trained(
        "unigram identity").encode("é")


def test_every_line_begins_a_word(trained):
    first = trained.encode("indented")
    assert trained.encode("x\nindented")[-len(first):] == first
    assert "".join(trained.pieces(trained.encode("a\n\nb"))) == "▁a⏎⏎▁b"


LONG = " ".join(" ".join(CORPUS[::2]).split())  # some ten segments for trained tokenizers


@pytest.mark.slow  # test_words.py has long texts
def test_long_text_is_cut_where_nothing_changes(trained):
    whole = trained.encode(LONG)
    assert [i for word in LONG.split() for i in trained.encode(word)] == whole
    assert trained.encode_with_symbols(LONG) == whole


def test_long_text_without_symbols_is_encoded_as_with_them(published):
    assert published.encode_with_symbols(LONG) == published.encode(LONG)


def test_special_tokens_in_text_are_plain_characters(trained):
    text = "a [MASK] b </s> <extra_id_0> [CLS]"
    special = trained.vocabulary.special
    assert not special[trained.encode(text)].any()
    assert trained.decode(trained.encode(text)) == text
    v = trained.vocabulary
    assert [i for i in trained.encode_with_symbols(text) if special[i]] == [v.mask, v.eos, v.sentinel, v.cls]
    # The mask stands for a word with the space before it; what follows is as it would be after the word.
    mask = trained.encode_with_symbols("ba [MASK], da [MASK]n.")
    comma, rest = _inside(trained, ","), _inside(trained, "n.")
    assert mask == [*trained.encode("ba"), v.mask, *comma, *trained.encode("da"), v.mask, *rest]


def _inside(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text that continues a word."""
    start = tokenizer.encode("\ue000")
    return tokenizer.encode("\ue000" + text)[len(start):]


def test_exported_templates(trained, tmp_path):
    v = trained.vocabulary
    a, b = trained.encode("ba da"), trained.encode("ko")
    wanted = {
        "bert": (BERT, [v.cls, *a, v.sep, *b, v.sep], [0] * (len(a) + 2) + [1] * (len(b) + 1)),
        "electra": (BERT, [v.cls, *a, v.sep, *b, v.sep], [0] * (len(a) + 2) + [1] * (len(b) + 1)),
        "roberta": (ROBERTA, [v.cls, *a, v.sep, v.sep, *b, v.sep], None),
        "gpt2": (GPT2, [*a, *b], None),
        "t5": (T5, [*a, v.eos, *b, v.eos], None),
    }
    for family, (template, ids, segments) in wanted.items():
        export(trained, tmp_path / family, template, 77)
        (tmp_path / family / "config.json").write_text(json.dumps({"model_type": family}))
        peer = transformers.AutoTokenizer.from_pretrained(tmp_path / family)
        got = peer("ba da", "ko")
        assert got["input_ids"] == ids
        assert got.get("token_type_ids") == segments
        assert peer.model_max_length == 77 and peer.padding_side == "right"
        assert (peer.pad_token_id, peer.mask_token_id, peer.eos_token_id) == (v.pad, v.mask, v.eos)
        assert peer("ba [MASK].", add_special_tokens=False)["input_ids"] == trained.encode_with_symbols("ba [MASK].")
        padded = peer(["ba", "ba da ko"], padding=True)["input_ids"][0]
        assert padded[-1] == v.pad
        assert peer.decode(peer("Ba da, ko.")["input_ids"], skip_special_tokens=True) == "Ba da, ko."


def test_save_load_pickle(any_trained, published, tmp_path):
    for number, tokenizer in enumerate((any_trained, published)):
        folder = tmp_path / str(number)
        tokenizer.save(folder)
        for copy in (Tokenizer.load(folder), pickle.loads(pickle.dumps(tokenizer))):
            assert copy == tokenizer and copy.fingerprint == tokenizer.fingerprint
            assert [*map(copy.encode, NASTY)] == [*map(tokenizer.encode, NASTY)]
            assert copy.vocabulary.mask == tokenizer.vocabulary.mask
        tokenizer.save(folder)  # saving the same tokenizer again is allowed
    with pytest.raises(UserError, match="another tokenizer"):
        published.save(tmp_path / "0")
    assert any_trained.fingerprint != published.fingerprint
    assert Tokenizer.load(tmp_path / "0").encode("x") == any_trained.encode("x")


def test_arrays_and_unpaired_surrogates(any_trained):
    trained, texts = any_trained, ["", "a\ud83d\ude00b", "\ud800", "plain"]
    arrays = trained.encode_arrays(texts)
    assert all(array.dtype == np.int32 for array in arrays)
    assert [array.tolist() for array in arrays] == [*map(trained.encode, texts)]
    assert trained.decode(arrays[1]) == "a😀b"
    assert trained.decode(arrays[2]) == ("�" if trained in map(_trained, IDENTITY) else " ")


def test_offsets_are_the_same_in_groups(any_trained, monkeypatch):
    """Texts are encoded in small groups, to limit the memory of their encodings."""
    texts = ["a red house", "", "plain", "the cat"]
    whole = any_trained.encode_with_offsets(texts)
    sizes, plain = [], any_trained._plain

    class Counted:
        def encode_batch(self, group, **options):
            sizes.append(len(group))
            return plain.encode_batch(group, **options)

    monkeypatch.setattr("jaxlm.tokenizers.tokenizer._GROUP", 3)
    monkeypatch.setattr(any_trained, "_plain", Counted())
    for ours, theirs in zip(any_trained.encode_with_offsets(texts), whole, strict=True):
        assert all(map(np.array_equal, ours, theirs))
    assert sizes == [3, 1]


def test_pieces_are_readable(published):
    if published.is_byte_level:
        ids = published.encode("ba  \n가")
        assert "".join(published.pieces(ids)).startswith("ba▁▁⏎")
        assert "Ġ" not in "".join(published.pieces(ids))
    else:
        assert published.pieces(published.encode("theing")) == ["the", "##ing"]


def xlnet_starts(piece: str) -> bool:
    """Return `_is_start_piece` of XLNet's data_utils.py, which for ASCII equals ALBERT's `_is_start_piece_sp`."""
    return piece.startswith(("▁", "<")) or piece in set("!\"#$%&\"()*+,-./:;?@[\\]^_`{|}~")


def test_word_starts(trained, published):
    ids = trained.encode("ba baba, ba (an) ab-ba; the: an? x_y!")
    pieces = [trained.piece(i) for i in ids]
    assert trained.vocabulary.word_start[ids].tolist() == [xlnet_starts(piece) for piece in pieces]
    assert {",", "-", ")"} <= set(pieces) and not trained.vocabulary.word_start[ids].all()
    ids = published.encode("ba baba, ba")
    pieces, starts = published.pieces(ids), published.vocabulary.word_start[ids].tolist()
    if published.is_byte_level:  # as fairseq has it: a word begins with its space
        assert starts == [piece.startswith("▁") for piece in pieces]
    else:
        assert starts == [not piece.startswith("##") for piece in pieces]
    for vocabulary in (trained.vocabulary, published.vocabulary):
        assert not (vocabulary.word_start & vocabulary.special).any()


@pytest.mark.parametrize("kind", ["unigram", "bpe", "byte-bpe"])
def test_words_and_sentences_of_scripts_without_spaces(kind, tmp_path):
    draw, kanji = random.Random(1), "日本語文字列学校先生東京大阪"
    sentences = ["".join(draw.choices(kanji, k=draw.randint(4, 9))) + draw.choice("。。！？") for _ in range(900)]
    tokenizer = train_tokenizer(["".join(sentences), "ba da. " * 50], tmp_path / "t", kind=kind, vocab_size=500)
    v, text = tokenizer.vocabulary, "日本語。東京！学校"
    ids = tokenizer.encode(text)
    marks = [piece.strip("▁") for piece, end in zip(tokenizer.pieces(ids), v.sentence_end[ids], strict=True) if end]
    assert marks in (["。", "！"], ["。", "!"])
    for i, end in enumerate(v.sentence_end[ids][:-1]):
        assert not end or v.word_start[ids[i + 1]]
    spelled = tokenizer.encode("京猫猫𠀀")[-10:]  # by bytes, of which the first begins a word
    assert len(tokenizer.pieces(spelled)) == 10 and v.word_start[spelled].tolist() == [
        i in (0, 3, 6) for i in range(10)
    ]


def test_split_sentences():
    text = "One (1.5 kg)? Yes!\u201d Then\n\nmore.  No. 3\r\n\u6587\u3002\u300d\u6587\uff01\uff1f end"
    sentences = list(split_sentences(text))
    assert "".join(sentences) == text
    assert [sentence.strip() for sentence in sentences] == [
        "One (1.5 kg)?", "Yes!\u201d", "Then", "more.", "No.", "3", "\u6587\u3002\u300d", "\u6587\uff01\uff1f", "end",
    ]
    assert list(split_sentences("")) == [""]
    for text, count in (
        ("Er sagte: „Ich gehe.“ Dann ging er.", 2), ("文である．３．１４は数．", 2), ("１．はじめに。", 1),
        ("Ｊ．Ｓ．バッハ", 1),
        ("ཀ། །ཁ། །", 2), ("他问。“为什么？”她说。", 3),
        ("བོད་ཡིག། བོད་སྐད།", 2), ("ሰላም፧ አዎ።", 2),
    ):
        assert len(list(split_sentences(text))) == count and "".join(split_sentences(text)) == text
    assert [*split_sentences("他问。“为什么？”她说。")][1].startswith("“")


def test_sentence_ends(trained, published):
    for tokenizer in (trained, published):
        v = tokenizer.vocabulary
        ids = tokenizer.encode("ba. da, ko! (an)? ab - the")
        ends = "".join(p.strip("▁") for p, end in zip(tokenizer.pieces(ids), v.sentence_end[ids], strict=True) if end)
        assert ends in (".!?", ".!)?"), ends
        assert not (v.sentence_end & v.special).any()


def test_the_unknown_token_counts_as_a_word(published, trained, tmp_path):
    for tokenizer in (published, trained):
        v = tokenizer.vocabulary
        if v.unk >= 0:
            assert not v.special[v.unk] and v.word_start[v.unk] and not v.sentence_end[v.unk]
    (tmp_path / "tokenizer_config.json").write_text('{"unk_token": "<|endoftext|>"}')  # as GPT-2's
    _write_byte_bpe(tmp_path)
    v = Tokenizer.load(tmp_path).vocabulary
    assert v.unk == v.eos and v.special[v.eos]


def test_missing_and_damaged_files(tmp_path, trained):
    cases = {
        "nothing": "there is no tokenizer",
        "empty": "no tokenizer in it",
        "bad.model": r"bad\.model cannot be read",
        "tokenizer.json": r"tokenizer\.json is no JSON from line 1 on",
        "list.json": r"list\.json: it is \[\]; it must be an object",
        "other.json": r"other\.json: model is missing; it must be an object",
        "vocab.txt": r"no line \[UNK\]",
        "latin.txt": r"latin\.txt cannot be read \('utf-8'",
        "added.json": r"added\.json: added_tokens is 5; it must be a list",
        "deep.json": r"deep\.json cannot be read \(maximum recursion depth",
        "large.json": "it has the id 3,000,000,000",
        "panic.json": r"panic\.json\) cannot be read \(its form is unknown\)",
        "odd.pkl": "not a known tokenizer file",
    }
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.model").write_bytes(b"\x00\x01nonsense")
    (tmp_path / "tokenizer.json").write_text('{"model": {')
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    (tmp_path / "latin.txt").write_bytes("[UNK]\né".encode("latin-1"))
    bpe = {"type": "BPE", "vocab": {"a": 3_000_000_000}, "merges": []}
    (tmp_path / "added.json").write_text(json.dumps({"model": bpe, "added_tokens": 5}))
    (tmp_path / "large.json").write_text(json.dumps({"model": bpe}))
    panic = {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]], "continuing_subword_prefix": "##"}
    (tmp_path / "panic.json").write_text(json.dumps({"model": bpe | panic}))
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "odd.pkl").write_bytes(pickle.dumps({}))
    for name, message in cases.items():
        with pytest.raises(UserError, match=message):
            Tokenizer.load(tmp_path / name)
    for name in ("a.model", "b.model"):
        (tmp_path / "empty" / name).write_bytes(b"")
    with pytest.raises(UserError, match="several tokenizers in it"):
        Tokenizer.load(tmp_path / "empty")
    half = tmp_path / "half"
    half.mkdir()
    (half / "merges.txt").write_text("a b\n")
    with pytest.raises(UserError, match="half of a byte-level BPE"):
        Tokenizer.load(half)
    trained.save(tmp_path / "saved")
    model = tmp_path / "saved" / "spiece.model"
    model.write_bytes(model.read_bytes()[:-200])
    with pytest.raises(UserError, match="is not what was saved"):
        Tokenizer.load(tmp_path / "saved")


def test_unreadable_files(tmp_path, trained, monkeypatch):
    """Root may read every file, so the error is simulated."""
    trained.save(tmp_path / "saved")
    model = tmp_path / "saved" / "spiece.model"
    read = type(epath.Path()).read_bytes

    def read_bytes(path):
        if path.name == model.name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(type(epath.Path()), "read_bytes", read_bytes)
    for path in (model, model.parent):
        with pytest.raises(UserError, match=r"spiece\.model cannot be read \(Permission denied\)"):
            Tokenizer.load(path)


def test_export_needs_special_tokens(published, tmp_path):
    with pytest.raises(UserError, match="has no"):
        export(published, tmp_path, BERT if published.is_byte_level else T5, 128)
    if published.is_byte_level:
        with pytest.raises(UserError, match=r"has no \[MASK\]"):
            published.vocabulary.require("mask", purpose="masking")


def test_case_of_wordpiece_is_read_from_the_vocabulary(tmp_path):
    _write_wordpiece(tmp_path)
    by_itself = Tokenizer.load(tmp_path)
    assert by_itself.pieces(by_itself.encode("THE")) == ["the"]
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    cased = Tokenizer.load(tmp_path)
    assert cased.pieces(cased.encode("THE")) == ["[UNK]"] and cased != by_itself
