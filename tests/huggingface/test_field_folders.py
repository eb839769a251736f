"""Folders as the field publishes them: ids of 200 lines in eight scripts, pairs, logits and round trips.

The peers are AutoTokenizer and the class of each model. What jaxlm cannot reproduce is refused by one sentence.
"""

from __future__ import annotations

import functools
import io
import json
import random
from pathlib import Path

import jax
import numpy as np
import pytest
import sentencepiece
import tokenizers
import torch
import transformers
from safetensors.numpy import load_file

from jaxlm.cli import main
from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.huggingface.families import family_named
from jaxlm.huggingface.family import Source
from jaxlm.huggingface.t5 import FIELDS
from jaxlm.models.base import Inputs
from jaxlm.models.layers.stack import call
from jaxlm.objectives.base import class_of
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.objectives.span_corruption import SpanCorruption
from jaxlm.tasks.classification import Classification
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.types import TokenBatch
from tests.huggingface.support import read_json
from tests.params import first_fast

TOLERANCE = 1e-4
ROWS, LENGTH, POSITIONS = 640, 24, 40
WORDS = {  # script → words, and what stands between them
    "Latin": ("the river Straße naïve Zürich l'été đường tiếng Việt İstanbul old-fashioned 42 3.5 déjà", " "),
    "Cyrillic": ("река Старый мост ещё йод подъезд Київ їжак 1917 Москва", " "),
    "Greek": ("το ποτάμι Ελλάδα άνθρωπος ώς γέφυρα Ώρα ϊ", " "),
    "Arabic": ("النهر قديم جِسْر كتاب لا ١٢٣ می‌خواهم پل", " "),
    "Devanagari": ("नदी पुराना पुल हिन्दी में ज़रूर कृष्ण १२३", " "),
    "Thai": ("แม่น้ำ เก่า สะพาน น้ำ ที่ ๑๒๓ ผู้", ""),
    "Hangul": ("강가에 나무가 서 있다 값이 않았다 영화는 재미있었다 ㅋㅋ", " "),
    "Han and kana": ("古い 橋 がある 这棵 树 東京 ガラス パン １２ の", ""),
}
ENDS = ("", ".", " !", "?", "…", "。", " (x)", "  ", " ﬁ½", " \u00a0e\u0301", " 🙂", "\t—\n")


@functools.cache
def lines() -> tuple[str, ...]:
    """Return 200 made-up lines, 25 of each script."""
    draw = random.Random(0)
    return tuple(
        space.join(draw.choices(words.split(), k=draw.randint(2, 9))) + draw.choice(ENDS)
        for words, space in WORDS.values() for _ in range(25)
    )


@functools.cache
def wordpieces(lowercase: bool, strip_accents: bool, special: tuple[str, ...]) -> dict[str, int]:
    """Train a WordPiece vocabulary on the lines."""
    model = tokenizers.BertWordPieceTokenizer(lowercase=lowercase, strip_accents=strip_accents)
    model.train_from_iterator(lines(), vocab_size=600, min_frequency=1, special_tokens=[*special], show_progress=False)
    return dict(sorted(model.get_vocab().items(), key=lambda item: item[1]))


@functools.cache
def pieces(**options) -> bytes:
    """Train a SentencePiece model on the lines."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines()), model_writer=model, vocab_size=480, hard_vocab_limit=False,
        character_coverage=0.995, minloglevel=2, **{key: [*value] if type(value) is tuple else value
                                                    for key, value in options.items()},
    )
    return model.getvalue()


T5_IDS = dict(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
MT5_SENTINELS = tuple(f"▁<extra_id_{k}>" for k in reversed(range(100)))


def save_model(folder: Path, family: str, architecture: str, untied: bool = True, **changes) -> torch.nn.Module:
    """Save a small model of a class; zero biases and unit norms would hide a mix-up.

    Transformers 5 ties the head of every new T5, but saves and loads an own one.
    """
    torch.manual_seed(0)
    encoder = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
                   max_position_embeddings=POSITIONS)
    encoder_decoder = dict(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
    sizes = encoder_decoder if "T5" in family else encoder
    config = getattr(transformers, f"{family}Config")(**{"vocab_size": ROWS} | sizes | changes)
    model = getattr(transformers, architecture)(config).eval()
    if "T5" in family and untied:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


def write(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def save_wordpiece(folder: Path, vocab: dict[str, int], **settings) -> None:
    """Save vocab.txt and tokenizer_config.json."""
    (folder / "vocab.txt").write_text("\n".join(vocab) + "\n", encoding="utf-8")
    write(folder, "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", **settings})


def save_whole(folder: Path) -> None:
    """Replace the tokenizer's files by what `save_pretrained` writes, a tokenizer.json."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for name in ("vocab.txt", "sentencepiece.bpe.model", "spiece.model"):
        (folder / name).unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    assert (folder / "tokenizer.json").is_file()


BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
KLUE_SPECIAL = ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")


def xlm_roberta(folder: Path) -> torch.nn.Module:
    (folder / "sentencepiece.bpe.model").write_bytes(pieces())
    return save_model(folder, "XLMRoberta", "XLMRobertaForMaskedLM", pad_token_id=1, type_vocab_size=1)


def xlm_roberta_whole(folder: Path) -> torch.nn.Module:
    model = xlm_roberta(folder)
    save_whole(folder)
    return model


def camembert(folder: Path) -> torch.nn.Module:
    (folder / "sentencepiece.bpe.model").write_bytes(pieces())
    write(folder, "tokenizer_config.json", {"tokenizer_class": "CamembertTokenizer"})
    return save_model(folder, "Camembert", "CamembertForMaskedLM", bos_token_id=5, eos_token_id=6, type_vocab_size=1)


def camembert_whole(folder: Path) -> torch.nn.Module:
    model = camembert(folder)
    save_whole(folder)
    return model


def klue_roberta(folder: Path) -> torch.nn.Module:
    save_wordpiece(folder, wordpieces(False, False, KLUE_SPECIAL), do_lower_case=False, bos_token="[CLS]",
                   eos_token="[SEP]")
    return save_model(folder, "Roberta", "RobertaForMaskedLM", pad_token_id=1, type_vocab_size=1)


def klue_roberta_whole(folder: Path) -> torch.nn.Module:
    model = klue_roberta(folder)
    save_whole(folder)
    return model


def koelectra_discriminator(folder: Path) -> torch.nn.Module:
    save_wordpiece(folder, wordpieces(False, False, BERT_SPECIAL), do_lower_case=False)
    return save_model(folder, "Electra", "ElectraForPreTraining", embedding_size=8)


def koelectra_generator(folder: Path) -> torch.nn.Module:
    save_wordpiece(folder, wordpieces(False, False, BERT_SPECIAL), do_lower_case=False)
    return save_model(folder, "Electra", "ElectraForMaskedLM", embedding_size=8)


def multilingual_cased(folder: Path) -> torch.nn.Module:
    save_wordpiece(folder, wordpieces(False, False, BERT_SPECIAL), do_lower_case=False)
    return save_model(folder, "Bert", "BertForMaskedLM")


def multilingual_uncased(folder: Path) -> torch.nn.Module:
    save_wordpiece(folder, wordpieces(True, True, BERT_SPECIAL), do_lower_case=True)
    return save_model(folder, "Bert", "BertForMaskedLM")


def korean_lowercase(folder: Path) -> torch.nn.Module:
    save_wordpiece(folder, wordpieces(True, False, BERT_SPECIAL), do_lower_case=True, strip_accents=False)
    return save_model(folder, "Bert", "BertForMaskedLM")


def bert_with_xlm_roberta_vocabulary(folder: Path) -> torch.nn.Module:
    """Multilingual MiniLM is one; its tokenizer gives no segments."""
    (folder / "sentencepiece.bpe.model").write_bytes(pieces())
    write(folder, "tokenizer_config.json", {"tokenizer_class": "XLMRobertaTokenizer"})
    return save_model(folder, "Bert", "BertForMaskedLM", pad_token_id=1)


def mt5(folder: Path) -> torch.nn.Module:
    (folder / "spiece.model").write_bytes(pieces(**T5_IDS, user_defined_symbols=MT5_SENTINELS))
    write(folder, "tokenizer_config.json", {"tokenizer_class": "T5Tokenizer", "extra_ids": 0})
    return save_model(folder, "MT5", "MT5ForConditionalGeneration")


def mt5_with_a_tied_head(folder: Path) -> torch.nn.Module:
    mt5(folder)
    return save_model(folder, "MT5", "MT5ForConditionalGeneration", untied=False)


def mt5_whole(folder: Path) -> torch.nn.Module:
    model = mt5(folder)
    save_whole(folder)
    return model


def byt5(folder: Path) -> torch.nn.Module:
    transformers.ByT5Tokenizer().save_pretrained(folder)
    return save_model(folder, "T5", "T5ForConditionalGeneration", vocab_size=384, feed_forward_proj="gated-gelu",
                      num_decoder_layers=1, tie_word_embeddings=False)


def byt5_as_published(folder: Path) -> torch.nn.Module:
    """The class stands in config.json, the sentinels are implied by extra_ids."""
    model = byt5(folder)
    for name in ("added_tokens.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    config = read_json(folder / "config.json")
    write(folder, "config.json", config | {"tokenizer_class": "ByT5Tokenizer"})
    write(folder, "tokenizer_config.json", {"extra_ids": 125, "pad_token": "<pad>", "eos_token": "</s>"})
    return model


def t5_with_ascending_sentinels(folder: Path) -> torch.nn.Module:
    sentinels = tuple(f"<extra_id_{k}>" for k in range(40))
    (folder / "spiece.model").write_bytes(pieces(**T5_IDS, user_defined_symbols=sentinels))
    write(folder, "tokenizer_config.json", {"tokenizer_class": "T5Tokenizer", "extra_ids": 0,
                                            "additional_special_tokens": [*sentinels]})
    return save_model(folder, "T5", "T5ForConditionalGeneration", tie_word_embeddings=False)


FOLDERS = {builder.__name__: builder for builder in (
    xlm_roberta, xlm_roberta_whole, camembert, camembert_whole, klue_roberta, klue_roberta_whole,
    koelectra_discriminator, koelectra_generator, multilingual_cased, multilingual_uncased, korean_lowercase,
    bert_with_xlm_roberta_vocabulary, mt5, mt5_whole, mt5_with_a_tied_head, byt5, byt5_as_published,
    t5_with_ascending_sentinels,
)}


def rows(loaded: PretrainedModel, texts: list[str]) -> list[list[int]]:
    """Return texts, or pairs of them, with the special tokens of the model's template."""
    template, v = loaded.objective.text_template, loaded.tokenizer.vocabulary
    encoded = [[np.array(loaded.tokenizer.encode(part), np.int32) for part in text] for text in texts]
    return [template.build(v, *parts) for parts in encoded]


@functools.partial(jax.jit, static_argnums=(0, 1))
def logits(model, network, params, inputs, decoder_ids):
    if network:
        encoder = getattr(model, network)
        own = model.generator_params(params) if network == "generator" else model.discriminator_params(params)
        hidden = encoder.hidden_states(own, Inputs.of(inputs))
        if network == "discriminator":
            return call(model.replaced_head, params["rtd_head"], hidden)[..., 0]
        return encoder.predict_tokens(own, hidden)
    hidden = model.hidden_states(params, Inputs.of(inputs))
    if decoder_ids is not None:
        hidden = model.decoder_states(params, decoder_ids, hidden, inputs["attention_mask"])
    return model.predict_tokens(params, hidden)


def difference(loaded: PretrainedModel, peer: torch.nn.Module, encoded: list) -> float:
    """Return the largest difference of logits for texts and pairs."""
    chosen = [row for row in encoded if len(row.input_ids) <= LENGTH]
    chosen = [chosen[i] for i in np.linspace(0, len(chosen) - 1, 8).astype(int)]
    pad = loaded.tokenizer.vocabulary.pad
    ids, segments, mask = (np.full((8, LENGTH), fill, np.int32) for fill in (pad, 0, 0))
    for i, row in enumerate(chosen):
        size = len(row.input_ids)
        ids[i, :size], segments[i, :size], mask[i, :size] = row.input_ids, row.segments, 1
    inputs, decoder_ids = {"input_ids": ids, "attention_mask": mask}, None
    network = {"ElectraForPreTraining": "discriminator", "ElectraForMaskedLM": "generator"}.get(type(peer).__name__, "")
    theirs = {name: torch.from_numpy(array).long() for name, array in inputs.items()}
    if "T5" in type(peer).__name__:
        decoder_ids = ids[::-1, :7].copy()
        theirs["decoder_input_ids"] = torch.from_numpy(decoder_ids).long()
    elif getattr(peer.config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = segments
        theirs["token_type_ids"] = torch.from_numpy(segments).long()
    with torch.no_grad():
        expected = peer(**theirs).logits.numpy()
    ours = np.asarray(logits(loaded.objective.model, network, loaded.params, inputs, decoder_ids))
    real = mask > 0 if decoder_ids is None else np.ones((8, 7), bool)
    assert np.abs(expected[real]).max() > 0.1  # agreement on zeros would prove nothing
    return float(np.abs(ours[real] - expected[real]).max())


FAST = (
    "xlm_roberta", "camembert_whole", "klue_roberta", "multilingual_cased", "korean_lowercase", "mt5",
    "byt5_as_published",
)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FOLDERS
])
def test_ids_and_logits_of_a_folder(name, tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    peer = FOLDERS[name](folder)
    theirs, loaded = transformers.AutoTokenizer.from_pretrained(folder), import_folder(folder)
    assert {path.split("/")[0] for path in loaded.fresh} <= {"generator", "discriminator", "rtd_head"}
    texts = [(line,) for line in lines()] + [*zip(lines()[:40], lines()[160:], strict=True)]
    encoded = rows(loaded, texts)
    assert sum(loaded.tokenizer.vocabulary.unk in row.input_ids for row in encoded) < 100
    for text, row in zip(texts, encoded, strict=True):
        expected = theirs(*text)
        assert row.input_ids.tolist() == expected["input_ids"], text
        if not name.startswith("klue"):  # its class has one segment type, its tokenizer two
            assert row.segments.tolist() == expected.get("token_type_ids", [0] * len(row.input_ids)), text
    assert len(loaded.tokenizer) == len(theirs)
    assert difference(loaded, peer, encoded) < TOLERANCE
    if loaded.fresh:  # one network of ELECTRA; the other one is initialized
        return
    out = export_folder(tmp_path / "out", loaded.objective, loaded.params, loaded.tokenizer, ModelCard())
    again, kept = transformers.AutoTokenizer.from_pretrained(out), load_file(out / "model.safetensors")
    assert [again(*text)["input_ids"] for text in texts] == [row.input_ids.tolist() for row in encoded]
    before = load_file(folder / "model.safetensors")
    assert all(np.array_equal(before[key], kept[key]) for key in before) and before.keys() == kept.keys()
    model, report = type(peer).from_pretrained(out, output_loading_info=True)  # also of the other model_type
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert difference(loaded, model.eval(), encoded) < TOLERANCE
    assert import_folder(out).tokenizer.vocabulary.sentinel == loaded.tokenizer.vocabulary.sentinel


def test_two_folders_of_koelectra_become_one(tmp_path):
    """The generator is put below the discriminator by hand."""
    peers = []
    for builder, folder in ((koelectra_discriminator, tmp_path), (koelectra_generator, tmp_path / "generator")):
        folder.mkdir(exist_ok=True)
        peers.append(builder(folder))
    loaded = import_folder(tmp_path)
    assert not loaded.fresh and not loaded.objective.model.share_embeddings
    encoded = rows(loaded, [(line,) for line in lines()])
    assert max(difference(loaded, peer, encoded) for peer in peers) < TOLERANCE


@pytest.mark.parametrize(("builder", "sentinels"), first_fast([
    (byt5, [f"byte {byte}" for byte in range(255, 244, -1)]),
    (t5_with_ascending_sentinels, [f"<extra_id_{k}>" for k in range(40)]),
    (mt5, [f"▁<extra_id_{k}>" for k in range(100)]),
    (mt5_whole, [f"▁<extra_id_{k}>" for k in range(100)]),
], 2))
def test_sentinels(builder, sentinels, tmp_path):
    builder(tmp_path)
    theirs, tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(tmp_path)
    v = tokenizer.vocabulary
    ids = [int(name[5:]) + 3 if name.startswith("byte") else theirs.convert_tokens_to_ids(name) for name in sentinels]
    assert [v.sentinel + v.sentinel_step * k for k in range(v.num_sentinels)] == ids
    # The named ones in a text are those of Transformers.
    text = "the <extra_id_1>"
    assert tokenizer.encode_with_symbols(text) == theirs(text, add_special_tokens=False)["input_ids"]
    # Span corruption numbers the spans with them.
    objective = SpanCorruption(noise_density=0.3).bind(v, 20)
    raw = objective.row_format(20).length
    tokens = np.full((2, raw), tokenizer.encode("r")[-1], np.int32)
    example = jax.jit(objective.corrupt)(jax.random.key(0), TokenBatch(tokens, np.ones_like(tokens)))
    num_spans = objective.lengths(20).spans
    assert num_spans > 1
    for row in (*example["input_ids"], *example["labels"]):
        assert [i for i in row.tolist() if i in ids] == ids[:num_spans]
    text, *_ = objective.describe(TokenBatch(tokens, np.ones_like(tokens)), jax.device_get(example), 0)
    assert text.ids == tokens[0].tolist()


@pytest.mark.slow
def test_continued_pretraining_of_an_mt5(tmp_path):
    (tmp_path / "hf").mkdir()
    mt5(tmp_path / "hf")
    (tmp_path / "text.txt").write_text("\n\n".join(lines() * 3), encoding="utf-8")
    preset, run, out = Path(__file__).parents[2] / "configs/t5_tiny.py", tmp_path / "run", tmp_path / "out"
    assert main([
        "pretrain", str(preset), "--init-from", str(tmp_path / "hf"), "--run-dir", str(run), "--data.source",
        str(tmp_path / "text.txt"), "--data.length", "32", "--data.held-out", "0.2", "--optimizer.warmup-steps", "1",
        "--train.steps", "2", "--train.phases", "", "--train.batch-size", "4", "--train.tracker", "none",
    ]) == 0
    assert main(["export", str(run), str(out)]) == 0
    model, report = transformers.MT5ForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not torch.equal(model.lm_head.weight, model.shared.weight)
    before, after = (load_file(path / "model.safetensors") for path in (tmp_path / "hf", out))
    changes = [np.abs(before[name] - after[name]).max() for name in before]
    assert before.keys() == after.keys() and 0 < max(changes) < 0.02  # two steps from where it was
    peers = [transformers.AutoTokenizer.from_pretrained(path) for path in (tmp_path / "hf", out)]
    text = f"{lines()[0]} <extra_id_0> {lines()[9]}"
    assert peers[0](text)["input_ids"] == peers[1](text)["input_ids"]


def test_defaults_of_mt5(tmp_path):
    """A config.json may leave them out."""
    source = Source(tmp_path, {"model_type": "mt5"}, ("lm_head.weight", "decoder.final_layer_norm.weight"))
    model = family_named("mt5", "here").read_objective(source).model
    theirs = transformers.MT5Config()
    assert all(getattr(model, ours) == getattr(theirs, name) for ours, (name, _) in FIELDS.items())
    assert (model.activation, model.tied_head, model.scaled_head) == (theirs.feed_forward_proj, False, False)


@pytest.mark.parametrize("family", ["Roberta", "Camembert", "XLMRoberta"])
def test_tasks_of_robertas_relatives(family, tmp_path):
    (camembert if family == "Camembert" else xlm_roberta)(tmp_path)
    save_model(tmp_path, family, f"{family}ForSequenceClassification", pad_token_id=1, type_vocab_size=1, num_labels=3)
    loaded = import_folder(tmp_path)
    assert class_of(loaded.objective) is Classification and len(loaded.objective.labels) == 3 and not loaded.fresh
    config = read_json(tmp_path / "config.json") | {"id2label": {"0": "A", "1": "B", "2": "A"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"config.json: id2label has the name 'A' 2 times; give each class a name"):
        import_folder(tmp_path)


def test_a_vocabulary_of_xlm_roberta_is_known_by_its_file(tmp_path):
    """The ids of its pieces would be off by one, which BERT's model does not show."""
    bert_with_xlm_roberta_vocabulary(tmp_path)
    named = Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer.load(tmp_path) == named and named.vocabulary.pad == 1


def test_a_vocabulary_of_mt5_gets_no_second_sentinels(tmp_path):
    mt5(tmp_path)
    named = Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer.load(tmp_path).vocabulary == named.vocabulary


PHOBERT = {"vocab.txt": "và 9\nlà@@ 7\n", "bpe.codes": "l à</w> 7\n"}
JAPANESE = {"vocab.txt": "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n東京\n##都\n"}
PIECE_BPE = {"vocab.json": '{"<s>": 0, "▁": 1, "a": 2, "▁a": 3}', "merges.txt": "▁ a\n"}


@pytest.mark.parametrize(("files", "config", "settings", "message"), [
    (PHOBERT, {"tokenizer_class": "PhobertTokenizer"}, {}, "class PhobertTokenizer, which jaxlm does not read"),
    (PHOBERT, {"model_type": "roberta"}, {"unk_token": "<unk>"}, "no line <unk>, so it is not a WordPiece vocabulary"),
    (PHOBERT, {"model_type": "roberta"}, {}, r"no line \[UNK\], so it is not a WordPiece vocabulary"),
    (JAPANESE, {"tokenizer_class": "BertJapaneseTokenizer"}, {"word_tokenizer_type": "mecab"},
     "word_tokenizer_type 'mecab', whose ids jaxlm cannot reproduce"),
    (JAPANESE, {}, {"word_tokenizer_type": "basic", "subword_tokenizer_type": "character"},
     "subword_tokenizer_type 'character', whose ids"),
    (JAPANESE, {"tokenizer_class": "BertJapaneseTokenizer"}, {}, "class BertJapaneseTokenizer, which jaxlm does not"),
    (PIECE_BPE, {"model_type": "roberta"}, {}, "is no byte-level BPE .*characters that stand for no byte"),
    ({}, {"model_type": "t5"}, {"tokenizer_class": "T5Tokenizer"}, "has no tokenizer in it"),
])
def test_tokenizers_that_are_refused(files, config, settings, message, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    write(tmp_path, "config.json", config)
    write(tmp_path, "tokenizer_config.json", settings)
    with pytest.raises(UserError, match=message):
        Tokenizer.load(tmp_path)


def test_a_published_phobert_is_refused(tmp_path):
    (tmp_path / "source").mkdir()
    for name, content in PHOBERT.items():
        (tmp_path / "source" / name).write_text(content, encoding="utf-8")
    transformers.PhobertTokenizer.from_pretrained(tmp_path / "source").save_pretrained(tmp_path / "hf")
    with pytest.raises(UserError, match="class PhobertTokenizer, which jaxlm does not read from WordPiece files"):
        Tokenizer.load(tmp_path / "hf")


@pytest.mark.parametrize(("family", "name"), [
    ("UMT5", "umt5"), ("XLMRobertaXL", "xlm-roberta-xl"),
])
def test_families_that_are_refused(family, name, tmp_path):
    architecture = "UMT5EncoderModel" if family == "UMT5" else f"{family}Model"
    sizes = dict(num_layers=1, d_model=8) if family == "UMT5" else dict(
        num_hidden_layers=1, hidden_size=8, intermediate_size=8, num_attention_heads=1)
    config = getattr(transformers, f"{family}Config")(vocab_size=32, **sizes)
    getattr(transformers, architecture)(config).save_pretrained(tmp_path)
    words = f"the family '{name}'(, which needs .*)?; jaxlm imports these families: .*camembert.*mt5"
    with pytest.raises(UserError, match=words):
        import_folder(tmp_path)


def test_a_t5_with_sentinels_of_other_names_is_not_pretrained(tmp_path):
    (tmp_path / "spiece.model").write_bytes(pieces(**T5_IDS, user_defined_symbols=("<X>", "<Y>", "<Z>")))
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "T5Tokenizer", "extra_ids": 0})
    save_model(tmp_path, "T5", "T5ForConditionalGeneration", tie_word_embeddings=False)
    loaded = import_folder(tmp_path)
    with pytest.raises(UserError, match="has no <extra_id_0>, which span corruption needs"):
        loaded.objective.bind(loaded.tokenizer.vocabulary, 20)
