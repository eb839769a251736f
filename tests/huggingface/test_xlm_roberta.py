"""XLM-R against XLMRobertaForMaskedLM, in both directions; its SentencePiece vocabulary; its presets."""

from __future__ import annotations

import csv
import functools
import gzip
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
import sentencepiece
import torch
import transformers
from safetensors.numpy import load_file

from jaxlm.cli import main
from jaxlm.config.presets import load_config, load_preset
from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.models.base import Inputs
from jaxlm.models.xlm_roberta import XlmRoberta
from jaxlm.objectives.base import Params
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.tokenizers import sentencepiece_json
from jaxlm.tokenizers.export import export
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.training import train_tokenizer
from tests.huggingface.support import read_json, real, torch_outputs
from tests.params import first_fast, random_params

TOLERANCE = 1e-4
POSITIONS = 40
SENTENCES = (
    "The old tree stands by the river, and nobody knows how old it is.",
    "L'été dernier, nous avons vu l'arbre près de la rivière !",
    "그 영화는 정말 재미있었다. 나무가 강가에 서 있다.",
    "这棵树在河边，没有人知道它有多大。",
)
# Characters that the vocabulary lacks, several spaces, what NFKC changes, symbols that are written out, nothing.
ODD_TEXTS = ("", "  two  spaces ", "ｆｕｌｌ ﬁ Ⅳ é", "日本 🙂 ჯ", "a\tb\nc", "so <mask> and </s>")


def train(texts: list[str], vocab_size: int) -> sentencepiece.SentencePieceProcessor:
    """Train a SentencePiece model with the special tokens of XLM-R's: <unk> 0, <s> 1, </s> 2."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=vocab_size, hard_vocab_limit=False,
        character_coverage=0.9995, minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def their_tokenizer(processor: sentencepiece.SentencePieceProcessor) -> transformers.XLMRobertaTokenizer:
    """Return Transformers' tokenizer with fairseq's ids: <s>, <pad>, </s>, <unk>, the pieces, <mask>."""
    proto = sentencepiece_json.parse(processor.serialized_model_proto())
    pieces = [(piece.piece, piece.score) for piece in proto.pieces[3:]]
    symbols = [(name, 0.0) for name in ("<s>", "<pad>", "</s>", "<unk>", "<mask>")]
    return transformers.XLMRobertaTokenizer(
        vocab=[*symbols[:4], *pieces, symbols[4]], model_max_length=POSITIONS,
        _spm_precompiled_charsmap=proto.normalizer_spec.precompiled_charsmap,
    )


@pytest.fixture(scope="module")
def peer() -> transformers.XLMRobertaTokenizer:
    return their_tokenizer(train([sentence for sentence in SENTENCES for _ in range(4)], 140))


def torch_model(peer, architecture: str = "XLMRobertaForMaskedLM") -> torch.nn.Module:
    """Return a model with random weights; zero biases and unit norms would hide a mix-up."""
    torch.manual_seed(0)
    config = transformers.XLMRobertaConfig(
        vocab_size=len(peer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        layer_norm_eps=1e-5, max_position_embeddings=POSITIONS + 2, type_vocab_size=1,
    )
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture
def folder(peer, tmp_path) -> Path:
    """A folder that `save_pretrained` of model and tokenizer wrote."""
    torch_model(peer).save_pretrained(tmp_path / "hf")
    peer.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


@functools.partial(jax.jit, static_argnums=0)
def logits(model: XlmRoberta, params: Params, ids: jax.Array, mask: jax.Array) -> jax.Array:
    return model.predict_tokens(params, model.hidden_states(params, Inputs(ids, mask=mask)))


def difference(objective: MaskedLM, params: Params, theirs: torch.nn.Module, peer) -> float:
    """Return the largest difference of logits for sentences of four languages, padded on either side."""
    found = []
    for side in ("left", "right"):
        options = dict(padding=True, padding_side=side, truncation=True, max_length=POSITIONS, return_tensors="np")
        inputs = dict(peer(list(SENTENCES), **options))
        assert len(set(inputs["attention_mask"].sum(1))) > 1
        expected = real(torch_outputs(theirs, inputs).logits.numpy(), inputs)
        assert np.abs(expected).max() > 0.1  # agreement on zeros would say nothing
        ours = logits(objective.model, params, inputs["input_ids"], inputs["attention_mask"])
        found.append(float(np.abs(real(ours, inputs) - expected).max()))
    return max(found)


def test_imported_logits_and_exported_files(peer, folder, tmp_path):
    imported = import_folder(folder)
    assert imported.fresh == ()
    assert type(imported.objective.model) is XlmRoberta and imported.objective.input_format == "full-sentences"
    assert imported.objective.model.max_length == POSITIONS
    v = imported.tokenizer.vocabulary
    assert (v.bos, v.pad, v.eos, v.unk, v.mask, v.cls, v.sep) == (0, 1, 2, 3, len(peer) - 1, 0, 2)
    theirs = transformers.XLMRobertaForMaskedLM.from_pretrained(folder).eval()
    assert difference(imported.objective, imported.params, theirs, peer) < TOLERANCE
    out = export_folder(tmp_path / "out", imported.objective, imported.params, imported.tokenizer, ModelCard())
    before, after = (load_file(path / "model.safetensors") for path in (folder, out))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    config = read_json(out / "config.json")
    assert (config["model_type"], config["architectures"]) == ("xlm-roberta", ["XLMRobertaForMaskedLM"])
    again = transformers.AutoTokenizer.from_pretrained(out)
    for text in (*SENTENCES, *ODD_TEXTS):
        assert again(text)["input_ids"] == peer(text)["input_ids"], text
        assert again(text, SENTENCES[1])["input_ids"] == peer(text, SENTENCES[1])["input_ids"]
    for text in SENTENCES:
        ids = imported.tokenizer.encode(text)
        assert peer(text)["input_ids"] == [0, *ids, 2]
        assert imported.tokenizer.decode(ids) == peer.decode(ids)


@pytest.mark.slow
def test_exported_logits(peer, tmp_path):
    """The vocabulary is trained by jaxlm, whose padding token has id 0."""
    texts = [f"{sentence} {a}{b}s {b}{a}ed" for sentence in SENTENCES for a in "abcdefgh" for b in "klmnop"]
    own = train_tokenizer(texts, tmp_path / "own", vocab_size=512)
    model = XlmRoberta(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48, max_positions=POSITIONS)
    objective = MaskedLM(model=model, input_format="full-sentences", short_rate=0.0)
    objective = objective.bind(own.vocabulary, POSITIONS)
    assert (objective.model.padding_id, objective.model.vocab_size) == (0, len(own))
    params = random_params(objective, 1)
    out = export_folder(tmp_path / "out", objective, params, own, ModelCard())
    theirs, report = transformers.AutoModelForMaskedLM.from_pretrained(out, output_loading_info=True)
    assert type(theirs) is transformers.XLMRobertaForMaskedLM
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert difference(objective, params, theirs.eval(), tokenizer) < TOLERANCE
    assert import_folder(out).objective.model == objective.model


@pytest.mark.slow
def test_continued_pretraining_of_a_published_model(folder, peer, tmp_path, capsys):
    """`--init-from` a Transformers folder, then export and fill-mask."""
    text, run, out = tmp_path / "text.txt", tmp_path / "run", tmp_path / "out"
    text.write_text("\n\n".join(" ".join(order) for order in itertools.permutations(SENTENCES)), encoding="utf-8")
    preset = Path(__file__).parents[2] / "configs" / "xlm_roberta_tiny.py"
    assert main([
        "pretrain", str(preset), "--init-from", str(folder), "--run-dir", str(run), "--data.source", str(text),
        "--data.length", "32", "--data.held-out", "0.2", "--optimizer.warmup-steps", "1", "--train.steps", "2",
        "--train.phases", "", "--train.batch-size", "4", "--train.tracker", "none",
    ]) == 0
    model = load_config(run / "config.json").objective.model
    assert (type(model), model.hidden_size, model.vocab_size) == (XlmRoberta, 32, len(peer))
    assert main(["export", str(run), str(out)]) == 0
    before, after = (load_file(path / "model.safetensors") for path in (folder, out))
    changes = [np.abs(before[name] - after[name]).max() for name in before]
    assert before.keys() == after.keys() and 0 < max(changes) < 0.01  # two steps from where it was
    capsys.readouterr()
    assert main(["fill-mask", str(out), "The old <mask> stands"]) == 0
    assert transformers.AutoTokenizer.from_pretrained(out)(SENTENCES[2]) == peer(SENTENCES[2])


def test_the_sentencepiece_model_alone_gives_the_same_ids(folder, peer):
    """Its pieces get fairseq's ids."""
    model = train([sentence for sentence in SENTENCES for _ in range(4)], 140).serialized_model_proto()
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    (folder / "sentencepiece.bpe.model").write_bytes(model)
    tokenizer = import_folder(folder).tokenizer
    v = tokenizer.vocabulary
    assert (v.bos, v.pad, v.eos, v.unk, v.mask, v.cls, v.sep) == (0, 1, 2, 3, len(peer) - 1, 0, 2)
    for text in (*SENTENCES, *ODD_TEXTS):
        assert [0, *tokenizer.encode_with_symbols(text), 2] == peer(text)["input_ids"], text


def lines(data: Path, language: str) -> Iterator[str]:
    """Yield real sentences of a language."""
    if language in ("en", "fr"):
        with gzip.open(data / "tatoeba_en_fr/train.tsv.gz", "rt", encoding="utf-8") as file:
            for row in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
                yield row[language == "fr"]
    elif language == "ko":
        with gzip.open(data / "nsmc/train.tsv.gz", "rt", encoding="utf-8") as file:
            yield from (line.split("\t")[1] for line in itertools.islice(file, 1, None))
    else:
        articles = json.loads(gzip.decompress((data / f"squad/xquad.{language}.train-articles.json.gz").read_bytes()))
        for paragraph in itertools.chain(*(article["paragraphs"] for article in articles["data"])):
            yield from paragraph["context"].split("。")


def test_ids_of_four_languages_are_those_of_sentencepiece_and_transformers(tmp_path, real_data):
    """200 lines of each language; ids are SentencePiece's plus one, because fairseq adds <pad>."""
    texts = {language: list(itertools.islice(lines(real_data, language), 600)) for language in ("en", "fr", "ko", "zh")}
    processor = train([text for found in texts.values() for text in found], 3000)
    peer = their_tokenizer(processor)
    peer.save_pretrained(tmp_path / "hf")
    ours = Tokenizer.load(tmp_path / "hf")
    export(ours, tmp_path / "out", XlmRoberta.template, POSITIONS)
    before, after = (transformers.AutoTokenizer.from_pretrained(tmp_path / name) for name in ("hf", "out"))
    for language, found in texts.items():
        own = [ours.encode(text) for text in found[-200:]]
        assert before(found[-200:])["input_ids"] == after(found[-200:])["input_ids"] == [[0, *ids, 2] for ids in own]
        expected = [[i + 1 if i else 3 for i in ids] for ids in processor.encode(found[-200:])]
        assert own == expected, language


# Conneau et al. 2020, section 3; counts of XLMRobertaForMaskedLM.
@pytest.mark.parametrize(("size", "parameters"), first_fast([("base", 278_295_186), ("large", 560_142_482)]))
def test_published_sizes(size, parameters):
    experiment = load_preset(str(Path(__file__).parents[2] / "configs" / f"xlm_roberta_{size}.py"))
    shapes = jax.eval_shape(experiment.objective.init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == parameters
    train = experiment.train
    assert (train.steps, train.batch_size, experiment.data.length) == (1_500_000, 8192, 512)
