"""SentencePiece models of every option: SentencePiece, jaxlm and Transformers after an export give the same ids."""

import io
import pickle
import random
import unicodedata

import pytest
import sentencepiece
import transformers

from jaxlm.errors import UserError
from jaxlm.tokenizers import sentencepiece_json
from jaxlm.tokenizers.export import export
from jaxlm.tokenizers.tokenizer import Tokenizer
from tests.data.stand_ins import build_store, whole
from tests.tokenizers.templates import GPT2
from tests.tokenizers.test_tokenizer import CORPUS, _trained

# Names inside words, with spaces, of other scripts, and some that normalization changes.
USER = ["bage", "<nl>", "[R]", "①", "\n", "ba da", "é", "ing"]
BPE, BYTES = {"model_type": "bpe"}, {"byte_fallback": True, "vocab_size": 700}
KEEP = {"remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True}
IDENTITY, NO_PREFIX = {"normalization_rule_name": "identity"}, {"add_dummy_prefix": False}
SYMBOLS, SPACES = {"user_defined_symbols": USER}, {"user_defined_symbols": [*USER, "▁▁"]}
CONTROL = {"control_symbols": ["[MASK]", "<extra_id_0>"], "pad_id": 3}
OPTIONS = {
    "unigram": CONTROL,
    "bpe": BPE | CONTROL,
    "unigram bytes": BYTES,
    "bpe bytes": BPE | BYTES,
    "unigram symbols": SYMBOLS,
    "bpe symbols": BPE | SYMBOLS,
    "unigram symbols keep": SPACES | KEEP,
    "bpe symbols keep bytes": BPE | SPACES | KEEP | BYTES,
    "unigram identity keep": IDENTITY | KEEP,
    "bpe identity symbols": BPE | IDENTITY | SYMBOLS,
    "unigram nfkc_cf across words": {
        "normalization_rule_name": "nfkc_cf", "split_by_whitespace": False, "seed_sentencepiece_size": 1000,
    },
    "bpe nfkc across words": BPE | {"normalization_rule_name": "nfkc", "split_by_whitespace": False},
    "unigram no prefix": NO_PREFIX,
    "bpe symbols no prefix": BPE | SYMBOLS | NO_PREFIX,
    "bpe identity keep no prefix": BPE | IDENTITY | KEEP | NO_PREFIX,
}
NAMES = ["<s>", "</s>", "<unk>", "[MASK]", "<extra_id_0>", "<0x0A>"]
ODD = [
    "日本🙂", "Ж", "漢漢字", "ｆｕｌｌ", "ﬁ", "½", "～", "b\x01", "b\x7f", "e\u0301", "각", "ﾊﾟ", "か\u3099",
    "a\u0301\u0302", "ﬁ\u0301", "b\u200db", "क़ि", "กำ", "👩‍👩‍👧", "İ", "＜nl＞", "0000", "====", "<ba", "ge>", "�", "Ⅳ",
]
SPACE = [" ", "  ", "   ", "\t", "\n", " \n ", "\n\n", "\r\n", "\u00a0", "\u3000", "b\u200b", "\ufeff"]


def _train(**options: object) -> bytes:
    model, lines = io.BytesIO(), [line for text in CORPUS[:200] for line in text.split("\n")]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, minloglevel=2, hard_vocab_limit=False,
        **{"vocab_size": 420} | options,
    )
    return model.getvalue()


def _texts(count: int) -> list[str]:
    draw, words = random.Random(0), " ".join(CORPUS[:9]).split()
    kinds = [words, words, USER, ODD, SPACE, NAMES]

    def text() -> str:
        return "".join(draw.choice(draw.choice(kinds)) + " " * draw.randint(0, 1) for _ in range(draw.randint(0, 9)))

    return ["", " ", *USER, *NAMES, *(text() for _ in range(count))]


@pytest.mark.parametrize("name", OPTIONS)
def test_sentencepiece_equals_jaxlm_and_transformers(name, tmp_path):
    model = _train(**OPTIONS[name])
    (tmp_path / "a.model").write_bytes(model)
    reference, tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model), Tokenizer.load(tmp_path / "a.model")
    export(tokenizer, tmp_path / "out", GPT2, 128)
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    texts, found = _texts(400), 0
    located = tokenizer.encode_with_offsets(texts)
    for text, expected, ids, (others, at) in zip(
        texts, reference.encode(texts), tokenizer.encode_arrays(texts), located, strict=True
    ):
        assert ids.tolist() == others.tolist(), text
        if "unigram" in name and sorted(ids) == sorted(expected):
            expected = ids.tolist()  # SentencePiece's rounding decides the order of the pieces of a repeated character
        assert ids.tolist() == expected, text
        if not any(symbol in text for symbol in NAMES):  # Transformers reads them as special tokens
            assert peer(text, add_special_tokens=False)["input_ids"] == expected, text
        for i, (start, end) in zip(ids, at, strict=True):
            if tokenizer.piece(i) in ("<nl>", "[R]", "①", "\n") and "＜" not in text:
                assert text[start:end].strip(" ") == tokenizer.piece(i).strip(" ")
                found += 1
    assert (found > 100) == ("symbols" in name)


MARKS = {  # letters → marks that are typed after them in any order
    "محدشل": "\u064e\u064f\u0650\u0651\u0652", "שבםה": "\u05b0\u05b8\u05bc\u05c1", "กทน": "\u0e31\u0e35\u0e48\u0e3a",
    "êơăae": "\u0323\u0301\u0309", "कगब": "\u093c\u094d\u0902", "ｶﾊ": "\uff9e\uff9f",
}


def test_marks_keep_their_order(tmp_path):
    """SentencePiece, unlike Unicode's NFC, does not sort them: neither shadda and vowel nor a circumflex and a dot."""
    draw = random.Random(0)
    texts = [" ".join("".join(draw.choice(letters) + "".join(draw.choices(marks, k=k)) for k in (0, 1, 2))
                      for letters, marks in MARKS.items()) for _ in range(300)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=300, hard_vocab_limit=False, minloglevel=2,
        character_coverage=1.0)
    (tmp_path / "a.model").write_bytes(model.getvalue())
    reference = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    tokenizer = Tokenizer.load(tmp_path / "a.model")
    assert sum(unicodedata.normalize("NFC", text) != text for text in texts) > 200
    for text in texts:
        assert tokenizer.encode(text) == reference.encode(text), text


@pytest.mark.parametrize("option", ["treat_whitespace_as_suffix", "escape_whitespaces=false", "unused pieces"])
def test_options_without_an_equal_are_refused_by_name(option, tmp_path):
    proto = sentencepiece_json.parse(_train(treat_whitespace_as_suffix=False))
    if option == "treat_whitespace_as_suffix":
        proto.trainer_spec.treat_whitespace_as_suffix = True
    elif option == "unused pieces":
        proto.pieces[9].type = proto.pieces[9].UNUSED
    else:
        proto.normalizer_spec.escape_whitespaces = False
    (tmp_path / "a.model").write_bytes(proto.SerializeToString())
    with pytest.raises(UserError, match=option):
        Tokenizer.load(tmp_path / "a.model")


def test_a_symbol_that_the_conversion_misses_is_refused(tmp_path):
    """`tokenizers` prepends no mark to a text whose first characters became one symbol."""
    (tmp_path / "a.model").write_bytes(_train(user_defined_symbols=["\n\n"]))
    with pytest.raises(UserError, match=r"a\.model cannot be exported: SentencePiece encodes '\\n\\n.* as \[\d+, 3,"):
        Tokenizer.load(tmp_path / "a.model")


def test_a_difference_is_an_error_of_the_store_and_the_export(tmp_path, monkeypatch):
    first, second = (pickle.loads(pickle.dumps(_trained("unigram"))) for _ in range(2))
    for tokenizer in (first, second):
        ids = tokenizer.encode("ba da")
        changed = tokenizer.to_json()
        vocab = changed["model"]["vocab"]
        vocab[ids[0]], vocab[ids[1]] = vocab[ids[1]], vocab[ids[0]]
        with monkeypatch.context() as patch:
            patch.setattr(tokenizer, "to_json", lambda changed=changed: changed)
            message = r"cannot be exported: SentencePiece encodes '.+' as \[.+\], but Transformers would as \[.+\]; use"
            with pytest.raises(UserError, match=message):
                if tokenizer is first:
                    build_store(tmp_path / "s", whole([*CORPUS, "ba da"]), tokenizer)
                else:
                    export(tokenizer, tmp_path / "out", GPT2, 128)
    assert not (tmp_path / "s").exists() and not (tmp_path / "out").exists()
