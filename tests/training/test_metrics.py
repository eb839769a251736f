"""What a run says of its figures: the baseline beside the losses that it suits, and curves that no full disk undoes."""

from __future__ import annotations

import json

import pytest
from matplotlib.figure import Figure

from jaxlm.training.loop import _evaluation_line
from jaxlm.training.metrics import draw_curves


@pytest.mark.parametrize(("name", "has"), [
    ("mlm_loss", True), ("lm_loss", True), ("generator_loss", True), ("span_loss", False), ("loss", False),
])
def test_the_unigram_entropy_stands_beside_losses_over_the_text_alone(name, has):
    line = _evaluation_line(7, {"loss": 3.5, name: 3.0, "accuracy": 0.25}, name, 2.0)
    assert f"{name} 3.0000" in line and "accuracy 0.2500" in line
    assert ("(unigram entropy 2.0000)" in line) == has


def test_curves_that_cannot_be_written_are_no_failure(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0}) + "\n")

    def full(self, path, **_):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    told = []
    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", full)
        assert draw_curves(tmp_path, told.append) is None
    assert told == [f"The curves are not drawn: cannot write {tmp_path / 'curves.png'}: No space left on device."]
    assert not (tmp_path / "curves.png").exists()
    assert draw_curves(tmp_path, told.append) == tmp_path / "curves.png" and len(told) == 1
