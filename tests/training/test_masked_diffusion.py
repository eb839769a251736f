"""A run of masked diffusion: pretraining, resumption, its samples from the command line, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jaxlm.cli import main
from tests.training.support import PRESET, metadata, metrics, stopped_after, write_text


@pytest.fixture(scope="module")
def diffusion(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("diffusion")
    text = PRESET.format(text=str(write_text(folder / "text.txt")))
    text = text.replace('        input_format="document",\n', "")
    text = text.replace("masked_lm", "masked_diffusion").replace("MaskedLM", "MaskedDiffusion")
    path = folder / "tiny.py"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def run(diffusion) -> Path:
    folder = diffusion.parent / "run"
    assert main(["pretrain", str(diffusion), "--run-dir", str(folder), "--train.eval-every", "6"]) == 0
    return folder


def held_out(run: Path) -> list[float]:
    return [line["eval_diffusion_loss"] for line in metrics(run) if "eval_diffusion_loss" in line]


def test_it_learns(run):
    first, last = held_out(run)
    assert 4.0 < last < first < 7.0


@pytest.mark.slow
def test_a_stop_changes_nothing(run, diffusion, tmp_path):
    command = ["pretrain", str(diffusion), "--run-dir", str(tmp_path / "other"), "--train.eval-every", "6"]
    assert stopped_after(7, command) == 143
    assert main(command) == 0
    assert metadata(tmp_path / "other", 12)["checksums"] == metadata(run, 12)["checksums"]
    assert held_out(tmp_path / "other") == held_out(run)


@pytest.mark.slow
def test_text_from_the_command_line(run, capsys):
    def printed(*arguments: str) -> str:
        assert main([*arguments]) == 0
        return capsys.readouterr().out

    options = ("--max-new-tokens", "5", "--steps", "4", "--logprobs")
    continued = printed("generate", str(run), "ba de", *options)
    assert continued.startswith("ba de") and continued.splitlines()[-1].endswith("together, 5 tokens")
    assert continued == printed("generate", str(run), "ba de", *options)
    assert continued != printed("generate", str(run), "ba de", *options, "--seed", "1")
    filled = printed("generate", str(run), "ba [MASK] de", *options)
    assert re.match(r"ba.*de\n", filled) and "[MASK]" not in filled
    assert filled.splitlines()[-1].endswith("together, 1 tokens")
    assert printed("generate", str(run), "ba [MASK]", "ba [MASK] de").count("prompt ") == 2
    assert "[MASK]" not in printed("fill-mask", str(run), "ba [MASK] de").partition("\n")[2]
    assert re.search(r"tokens masked with probability 0\.\d+, weight", printed("show", str(run)))


def test_an_exported_folder_says_why_it_continues_no_text(run, tmp_path, capsys):
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert main(["generate", str(tmp_path / "out"), "ba"]) == 2
    assert "The export of a masked diffusion run is a masked model; generate with the run." in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "words"), [
    (["--stop", "x"], "only masked diffusion is sampled in steps, without beams and stop strings"),
    (["--beams", "2"], "only masked diffusion is sampled in steps, without beams and stop strings"),
    (["--steps", "0"], "steps is 0; it must be in"),
    (["--max-new-tokens", "40"], "tokens with special tokens, but the model takes 32"),
])
def test_refusals(run, capsys, arguments, words):
    assert main(["generate", str(run), "ba", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
