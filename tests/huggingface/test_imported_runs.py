"""Runs written by `jaxlm import`: they support whatever the Transformers folder supports."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import sentencepiece
import torch
import transformers

import jaxlm
from jaxlm.cli import main
from jaxlm.config.presets import load_config
from jaxlm.objectives.masked_lm import MaskedLM
from tests.huggingface.support import VOCAB, save_torch, torch_bert
from tests.training.support import write_text

ROWS = len(VOCAB) + 300
TRAINING = ["--train.steps", "1", "--train.batch-size", "4", "--train.tracker", "none", "--data.held-out", "0.1"]

TOKENIZER_FILES = "tokenizer_config.json", "tokenizer.json"


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt", documents=40)


@pytest.fixture
def padded_bert(tmp_path, vocab_file, capsys) -> tuple[Path, Path]:
    """Return the Transformers folder and the run of a model with 300 unused rows and 40 positions."""
    folder, run = save_torch(torch_bert("gelu", vocab_size=ROWS), tmp_path / "hf", vocab_file), tmp_path / "run"
    assert main(["import", str(folder), str(run)]) == 0
    assert f"Its tokenizer has {len(VOCAB)} tokens for the model's {ROWS} rows" in capsys.readouterr().out
    return folder, run


def test_an_import_on_a_full_disk_may_be_repeated(padded_bert, tmp_path, capsys, monkeypatch):
    command = ["import", str(padded_bert[0]), str(tmp_path / "again")]
    with monkeypatch.context() as patch:
        patch.setattr("jaxlm.training.checkpoints.shutil.disk_usage", lambda _: SimpleNamespace(free=0))
        assert main(command) == 2
    assert "no space is left" in capsys.readouterr().err and main(command) == 0


@pytest.mark.slow
def test_spare_rows_and_few_positions(padded_bert, text, capsys, monkeypatch):
    """The embedding keeps its rows, and the run's length is within the model's positions."""
    folder, run = padded_bert
    bound, bind = [], MaskedLM.bind
    with monkeypatch.context() as patch:
        patch.setattr(MaskedLM, "bind", lambda *arguments: bound.append(bind(*arguments)) or bound[-1])
        flags = ["--data.source", str(text), "--data.length", "40", "--train.phases", ""]
        assert main(["show", "configs/bert_tiny.py", "--init-from", str(folder), *flags]) == 0
    assert bound[-1].model.vocab_size == ROWS and capsys.readouterr()
    answers = []
    for path in padded_bert:
        assert main(["fill-mask", str(path), "the [MASK] sat"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert main(["pretrain", str(run)]) == 2
    assert "--data.source is empty" in capsys.readouterr().err
    assert main(["show", str(run), "--data.source", str(text), "--examples", "1"]) == 0
    assert main(["pretrain", str(run), "--data.source", str(text), *TRAINING]) == 0
    said = capsys.readouterr().out
    assert "batches of 4 x 40" in said and "rises over 500 steps and this run has 1;" in said
    loaded = jaxlm.load(str(run))
    assert loaded.objective.model.vocab_size == len(loaded.params["embeddings"]["word"]["embedding"]) == ROWS
    assert main(["export", str(run), str(folder.parent / "out")]) == 0


@pytest.mark.slow
def test_a_t5_without_sentinels_generates_but_is_not_trained(tmp_path, text, capsys):
    folder, run = tmp_path / "hf", tmp_path / "run"
    folder.mkdir()
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "spiece"), vocab_size=60, hard_vocab_limit=False, pad_id=0,
        eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    )
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer", "extra_ids": 0}')
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=512, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4)
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    assert main(["import", str(folder), str(run)]) == 0
    for path in (folder, run):
        assert main(["generate", str(path), "bada", "--temperature", "0", "--max-new-tokens", "4"]) == 0
    capsys.readouterr()
    assert main(["pretrain", str(run), "--data.source", str(text), *TRAINING]) == 2
    said = capsys.readouterr()
    assert "has no <extra_id_0>, which span corruption needs" in said.err
    assert "Tokenizing" not in said.out  # raised before the corpus is read, which may take an hour


@pytest.mark.parametrize(
    ("kept", "mask", "lacks"),
    [
        pytest.param("bert", "[MASK]", "mlm_head", marks=pytest.mark.slow),
        pytest.param("electra", "[MASK]", "generator", marks=pytest.mark.slow),
        pytest.param("t5", None, "lm_head", marks=pytest.mark.slow),
    ],
)
def test_models_without_an_output_head_do_not_answer(kept, mask, lacks, tmp_path, vocab_file, text, capsys):
    if kept == "bert":
        folder = save_torch(torch_bert("gelu").bert, tmp_path / "hf", vocab_file)
    elif kept == "electra":
        config = transformers.ElectraConfig(
            vocab_size=len(VOCAB), embedding_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=24, max_position_embeddings=40,
        )
        folder = save_torch(transformers.ElectraForPreTraining(config), tmp_path / "hf", vocab_file)
    else:
        config = transformers.T5Config(
            vocab_size=len(VOCAB), d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4, tie_word_embeddings=False
        )
        folder = save_torch(transformers.T5Model(config), tmp_path / "hf", vocab_file)
        # A T5 reads a text as $A </s>.
        settings, tokenizer = (json.loads((folder / name).read_text()) for name in TOKENIZER_FILES)
        del tokenizer["post_processor"]["single"][0], tokenizer["post_processor"]["pair"][0]
        for name, content in zip(TOKENIZER_FILES, (settings | {"eos_token": "[SEP]"}, tokenizer), strict=True):
            (folder / name).write_text(json.dumps(content))
    run = tmp_path / "run"
    assert main(["import", str(folder), str(run)]) == 0
    assert "initialized afresh" in capsys.readouterr().out
    command = ["fill-mask", "the [MASK] sat"] if mask else ["generate", "the cat"]
    assert main(["export", str(run), str(tmp_path / "again")]) == 0
    for path in (folder, run, tmp_path / "again"):
        assert main([command[0], str(path), command[1]]) == 2
        assert f"{path} has no {lacks}, so it would answer at random" in capsys.readouterr().err
        with pytest.warns(UserWarning, match=f"has no .*{lacks.split()[-1]}"):
            jaxlm.load(str(path))
    if mask:
        assert main(["pretrain", str(run), "--data.source", str(text), *TRAINING]) == 0
        assert main(["export", str(run), str(tmp_path / "trained")]) == 0
        for path in (run, tmp_path / "trained"):
            assert main([command[0], str(path), command[1]]) == 0


@pytest.mark.slow
def test_training_options_of_an_import_may_change_but_not_its_architecture(padded_bert, text, capsys):
    _, run = padded_bert
    training = ["pretrain", str(run), "--data.source", str(text), *TRAINING]
    for flag, value in (
        ("--objective.model.num-layers", "3"), ("--objective.model.activation", "relu"),
        ("--data.tokenizer", "vocab.txt"), ("--objective.model.vocab-size", "512"),
        ("--objective.input-format", "document"),
    ):
        capsys.readouterr()
        assert main([*training, flag, value]) == 2
        assert f"{flag[2:].replace('-', '_')}: " in capsys.readouterr().err
    changes = ["--objective.model.dtype", "bfloat16", "--objective.model.dropout", "0", "--objective.mask-rate", "0.2"]
    assert main([*training, "--objective.model.remat", "full", *changes]) == 0
    assert "Starting from the parameters of step 0, as imported" in capsys.readouterr().out
    objective = load_config(run / "config.json").objective
    assert (objective.model.dtype, objective.model.remat, objective.mask_rate) == ("bfloat16", "full", 0.2)
    # After the first step only execution settings may change.
    assert main([*training, "--objective.model.remat", "none"]) == 0
    assert main([*training, "--objective.model.dtype", "float32"]) == 2
