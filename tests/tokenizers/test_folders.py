"""Folders as Transformers saves them, against the ids of `AutoTokenizer` or of SentencePiece."""

import io
import json
import unicodedata

import numpy as np
import pytest
import sentencepiece
import transformers
from tokenizers import ByteLevelBPETokenizer

from jaxlm.errors import UserError
from jaxlm.models.bert import Bert
from jaxlm.models.roberta import Roberta
from jaxlm.tokenizers.export import export
from jaxlm.tokenizers.tokenizer import Tokenizer

WORDS = (
    "the river Stone crosses a wide garden", "Zürich naïve Cafe 42 copper", "“silver” window (bread) Ａｂｃ ﬁne",
    "안녕 하세요",
)
TEXTS = [
    *WORDS, "", "The STENOSIS of troponin, at 4 o'clock: ``x''", "a  b\tc", "Ｒｉｖｅｒ ½ é",
    "the [MASK] <mask> stone</s>",
]
ROLES = ("pad", "unk", "cls", "sep", "mask", "bos", "eos")
LAYOUTS = {
    "t5": {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    "albert": {"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, "control_symbols": ["[CLS]", "[SEP]", "[MASK]"]},
    "xlnet": {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1,
              "control_symbols": ["<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"]},
    "deberta-v2": {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "pad_piece": "[PAD]", "bos_piece": "[CLS]",
                   "eos_piece": "[SEP]", "unk_piece": "[UNK]"},
    "xlm-roberta": {},
}
LAYOUTS["camembert"] = LAYOUTS["xlm-roberta"]
FILES = {name: "sentencepiece.bpe.model" for name in ("xlm-roberta", "camembert")} | {"deberta-v2": "spm.model"}


def write(folder, **files):
    """Write files of JSON; `config` stands for tokenizer_config.json, `model` for the model_type of config.json."""
    names = {"config": "tokenizer_config", "roles": "special_tokens_map", "added": "added_tokens"}
    if "model" in files:
        files["config.json"] = {"model_type": files.pop("model")}
    for name, content in files.items():
        (folder / f"{names.get(name, name).removesuffix('.json')}.json").write_text(json.dumps(content))


def write_sentencepiece(folder, model_type):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["▁".join(WORDS).replace("▁", " "), *WORDS] * 4), model_writer=model, vocab_size=120,
        hard_vocab_limit=False, character_coverage=1.0, minloglevel=2, **LAYOUTS[model_type])
    (folder / FILES.get(model_type, "spiece.model")).write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def write_wordpiece(folder, roles=("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")):
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,:'()`"
    pieces = [*roles, *letters, *("##" + letter for letter in letters), "the", "##er", "river", "at"]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")


def write_byte_bpe(folder, special):
    model = ByteLevelBPETokenizer()
    model.train_from_iterator(WORDS, vocab_size=300, special_tokens=special, show_progress=False)
    model.save_model(str(folder))


def is_same(folder, texts=TEXTS):
    """Compare with `AutoTokenizer`, which recognizes special tokens in a text."""
    ours, peer = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in texts:
        assert ours.encode_with_symbols(text) == peer(text, add_special_tokens=False)["input_ids"], text
    assert len(ours) == len(peer)
    for role in ROLES:
        theirs = getattr(peer, f"{role}_token_id")
        assert theirs is None or getattr(ours.vocabulary, role) == theirs, role
    ours.save(folder / "saved")
    assert Tokenizer.load(folder / "saved").vocabulary == ours.vocabulary
    return ours


FOLDERS = {
    "model type": ("wordpiece", {"model": "bert", "config": {"do_lower_case": True}}),
    "added_tokens.json": ("wordpiece", {
        "config": {"tokenizer_class": "BertTokenizer", "do_lower_case": True},
        "added": {"troponin": 96, "stenosis": 95}}),
    "added_tokens_decoder": ("wordpiece", {"roles": {"pad_token": "the"}, "config": {
        "tokenizer_class": "BertTokenizerFast", "do_lower_case": True, "bos_token": "[CLS]", "eos_token": "[END]",
        "additional_special_tokens": ["[E1]"], "added_tokens_decoder": {
            "95": {"content": "troponin"}, "96": {"content": "[E2]", "special": True, "lstrip": True}}}}),
    "special_tokens_map.json": ("wordpiece", {"model": "bert", "roles": {"pad_token": {"content": "the"}}, "config": {
        "do_lower_case": False, "strip_accents": True, "tokenize_chinese_chars": False, "pad_token": "[PAD]"}}),
    "byte-bpe": ("roberta", {"model": "roberta", "config": {"add_prefix_space": True}, "added": {"STENOSIS": 272}}),
    "appended padding": ("gpt2", {"model": "gpt2", "roles": {"pad_token": "[PAD]"}}),
    "appended symbols": ("gpt2", {"model": "gpt2", "roles": {
        "pad_token": "[PAD]", "cls_token": "[CLS]", "eos_token": "</s>", "bos_token": "<s>", "sep_token": "[SEP]"}}),
    "tokenizer.json": ("json", {"config": {
        "tokenizer_class": "BertTokenizer", "do_lower_case": False, "eos_token": "[END]"}, "added": {"STENOSIS": 95}}),
    "tokenizer.json by type": ("json", {"model": "nomic_bert", "config": {"do_lower_case": False}}),
    **{name: (name, {"model": name}) for name in LAYOUTS if name != "deberta-v2"},
    "extra_ids": ("t5", {"model": "t5", "config": {"extra_ids": 3}}),
    "no extra_ids": ("t5", {"config": {"tokenizer_class": "T5Tokenizer", "extra_ids": 0}}),
    "cased ALBERT": ("albert", {"model": "albert", "config": {"do_lower_case": False, "keep_accents": True}}),
    "ALBERT with new words": ("albert", {"model": "albert", "added": {"stenosis": 51, "[E1]": 52}, "roles": {
        "additional_special_tokens": ["[E1]"]}}),
    "XLM-R with new words": ("xlm-roberta", {"config": {"tokenizer_class": "XLMRobertaTokenizer"}, "added": {
        "<mask>": 50, "troponin": 51}}),
}


def test_words_of_a_file_that_does_not_name_its_model(tmp_path):
    """BERT's own tokenizer.json is one; `##` tells where its words begin."""
    write_wordpiece(tmp_path)
    typed = Tokenizer.load(tmp_path)
    content = typed.to_json()
    del content["model"]["type"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    starts = Tokenizer.load(tmp_path).vocabulary.word_start
    assert np.array_equal(starts, typed.vocabulary.word_start) and 40 < starts.sum() < 60


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_equal_transformers(name, tmp_path):
    kind, files = FOLDERS[name]
    if kind in LAYOUTS:
        write_sentencepiece(tmp_path, kind)
    elif kind in ("roberta", "gpt2"):
        roberta = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        write_byte_bpe(tmp_path, roberta if kind == "roberta" else ["<|endoftext|>"])
    else:
        write_wordpiece(tmp_path)
    if kind == "json":
        write(tmp_path, config={"tokenizer_class": "BertTokenizer", "do_lower_case": True})
        transformers.AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
        (tmp_path / "vocab.txt").unlink()
    write(tmp_path, **files)
    # Without tokenizer.json, Transformers 5 forgets that RoBERTa's <mask> takes the space before it. It does not
    # compose Hangul that ALBERT and XLNet decompose to strip accents, as SentencePiece does in their code.
    is_composed = kind not in ("albert", "xlnet") or files.get("config", {}).get("keep_accents")
    texts = TEXTS if is_composed else [*TEXTS[:3], *TEXTS[4:]]
    ours = is_same(tmp_path, texts[:-1] if kind == "roberta" else texts)
    if kind in ("albert", "xlnet"):
        reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spiece.model"))
        assert ours.encode(TEXTS[3]) == reference.encode(unicodedata.normalize("NFKD", TEXTS[3]))


def test_deberta_equals_sentencepiece(tmp_path):
    """Transformers 5 drops the normalization of spm.model, which the published model keeps."""
    reference = write_sentencepiece(tmp_path, "deberta-v2")
    write(tmp_path, model="deberta-v2", config={"do_lower_case": False, "vocab_type": "spm"})
    tokenizer, peer = Tokenizer.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert [*map(tokenizer.encode, TEXTS)] == [*map(reference.encode, TEXTS)]
    assert tokenizer.vocabulary.mask == len(reference) == peer.mask_token_id and len(tokenizer) == len(peer)
    assert tokenizer.vocabulary.bos == tokenizer.vocabulary.cls == peer.cls_token_id


def test_published_files_without_configuration(tmp_path):
    for name, size in {"t5": 149, "xlm-roberta": 51}.items():
        (tmp_path / name).mkdir()
        write_sentencepiece(tmp_path / name, name)
        by_itself = Tokenizer.load(tmp_path / name)
        write(tmp_path / name, model=name)
        assert by_itself == Tokenizer.load(tmp_path / name) and len(by_itself) == size
    v = Tokenizer.load(tmp_path / "t5").vocabulary
    assert (v.sentinel, v.num_sentinels) == (148, 100)


KOREAN = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "안녕", "##하", "##세요", "hi", "##gh"]
HINDI = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "में", "सब", "लोग", "खुश", "##थे", "थे"]


@pytest.mark.parametrize(("pieces", "text", "expected"), [
    (KOREAN, "안녕하세요 HIGH", [5, 6, 7, 8, 9]),
    (HINDI, "में सब लोग खुश थे", [5, 6, 7, 8, 10]),
    ([*KOREAN[:5], "ab", "##c"], "ÁBC", [5, 6]),
    ([*KOREAN[:5], "Ab", "##c", "é"], "Abc é", [5, 6, 7]),
    ([*KOREAN[:5], *(f"w{i}" for i in range(120)), "T", "##c", "ab"], "ABC", [127, 126]),  # one capital word was added
    (["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"ქალაქი{i}" for i in range(98)), "A", "b"],
     "A ქალაქი9 b", [103, 14, 104]),  # a script without capitals
])
def test_case_and_accents_of_a_bare_vocabulary(pieces, text, expected, tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    assert Tokenizer.load(tmp_path / "vocab.txt").encode(text) == expected
    write(tmp_path, model="bert")
    assert Tokenizer.load(tmp_path).encode(text) == expected


def test_accents_are_not_lost_in_silence(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(KOREAN) + "\n", encoding="utf-8")
    write(tmp_path, config={"do_lower_case": True})
    with pytest.raises(UserError, match=r'"strip_accents" in tokenizer_config\.json'):
        Tokenizer.load(tmp_path)
    write(tmp_path, config={"do_lower_case": True, "strip_accents": False, "tokenizer_class": "BertTokenizer"})
    is_same(tmp_path, ["안녕하세요 HIGH"])


def test_the_normalizer_of_bert_before_byte_level_bpe_is_named(tmp_path):
    """The pieces stand for bytes, so that their letters with accents are none."""
    write_byte_bpe(tmp_path, ["<|endoftext|>"])
    write(tmp_path, model="gpt2")
    content = Tokenizer.load(tmp_path).to_json()
    content["normalizer"] = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                             "strip_accents": None, "lowercase": True}
    write(tmp_path, tokenizer=content)
    message = r'tokenizer\.json has byte-level BPE, .* after a BertNormalizer, .*set "strip_accents" in its normalizer'
    with pytest.raises(UserError, match=message):
        Tokenizer.load(tmp_path)
    content["normalizer"]["strip_accents"] = True
    write(tmp_path, tokenizer=content)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("Zürich NAÏVE")) == "zurich naive"


@pytest.mark.parametrize(("files", "message"), [
    ({"config": {"tokenizer_class": "KoBertTokenizer"}}, "class KoBertTokenizer"),
    ({"config.json": {"model_type": "bert", "tokenizer_class": "PhobertTokenizer"}}, "class PhobertTokenizer"),
    ({"config": {"tokenizer_class": "PhobertTokenizer"}, "tokenizer": {"model": {"vocab": {}}}}, "PhobertTokenizer"),
    ({"config": {"tokenizer_class": "T5Tokenizer"}}, "class T5Tokenizer"),
    ({"config": {"tokenizer_class": "BertJapaneseTokenizer", "word_tokenizer_type": "mecab"}}, "_type 'mecab'"),
    ({"config": {"sp_model_kwargs": {"enable_sampling": True, "alpha": 0.1}}}, "with enable_sampling True"),
    ({"added": {"stenosis": 400}}, r"'stenosis' the id 400, but .* it is 95"),
    ({"added": {"stenosis": 0}}, r"'stenosis' the id 0"),
])
def test_unknown_folders_are_refused(files, message, tmp_path):
    write_wordpiece(tmp_path)
    write(tmp_path, **files)
    with pytest.raises(UserError, match=message):
        Tokenizer.load(tmp_path)


def test_names_of_special_tokens_in_a_text_are_text(tmp_path):
    """A published unigram tokenizer.json has them among its pieces, with the best of all scores."""
    write_sentencepiece(tmp_path, "xlm-roberta")
    write(tmp_path, model="xlm-roberta")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path / "json")
    ours, plain = Tokenizer.load(tmp_path / "json"), Tokenizer.load(tmp_path)
    assert dict(ours.to_json()["model"]["vocab"])["</s>"] < -5 and (tmp_path / "json" / "tokenizer.json").is_file()
    for text in ("a </s> b", "a<s>b</s>", "the <mask> <unk> <pad>", *TEXTS[:3]):
        ids = ours.encode(text)
        assert not ours.vocabulary.special[ids].any() and ids == plain.encode(text)
    assert ours.encode_with_symbols("a <mask>")[-1] == ours.vocabulary.mask
    assert ours.encode(TEXTS[0]) == theirs.encode(TEXTS[0], add_special_tokens=False)


def test_pieces_of_sentencepiece_in_vocab_txt_are_refused(tmp_path):
    (tmp_path / "vocab.txt").write_text("[UNK]\n▁a\nb\n", encoding="utf-8")
    with pytest.raises(UserError, match="pieces with ▁, so it is not a WordPiece"):
        Tokenizer.load(tmp_path)


def test_unknown_steps_of_a_tokenizer_json_are_refused(tmp_path):
    steps = {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "JapaneseWords"}]}
    write(tmp_path, tokenizer={"model": {"type": "WordPiece", "vocab": {"a": 0}}, "normalizer": steps})
    with pytest.raises(UserError, match=r"the normalizer .*JapaneseWords.* of .*/tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(("model", "config", "expected"), [
    (Roberta, {"tokenizer_class": "BertTokenizer"}, "[CLS] the [SEP] river [SEP]"),
    (Roberta, {}, "[CLS] the [SEP] [SEP] river [SEP]"),
    (Bert, {"tokenizer_class": "BertTokenizer"}, "[CLS] the [SEP] river [SEP]"),
])
def test_pairs_have_the_separators_of_the_folder(model, config, expected, tmp_path):
    """KLUE's RoBERTa has BERT's tokenizer."""
    write_wordpiece(tmp_path)
    write(tmp_path, config={"do_lower_case": True, "bos_token": "[CLS]", "eos_token": "[SEP]", **config})
    tokenizer = Tokenizer.load(tmp_path)
    template = model.template.for_vocabulary(tokenizer.vocabulary)
    row = template.build(tokenizer.vocabulary, *map(np.array, map(tokenizer.encode, ("the", "river"))))
    assert " ".join(tokenizer.pieces(row.input_ids)) == expected
    assert max(row.segments) == model().type_vocab_size - 1
    export(tokenizer, tmp_path / "out", template, 64)
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert peer("the", "river")["input_ids"] == row.input_ids.tolist()
    # The exported tokenizer.json tells the same.
    assert Tokenizer.load(tmp_path / "out").vocabulary.separators == expected.count("[SEP]") - 1
