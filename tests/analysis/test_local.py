"""`jaxlm plan` without --topology: the compiled step of this machine, predicted and measured."""

import json

import pytest

from jaxlm.cli import main


def test_the_step_here_is_compiled_predicted_and_measured(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxlm.analysis.bench.ROUND_SECONDS", 0.01)
    monkeypatch.setattr("jaxlm.analysis.local.measured_bandwidth", lambda device: 5e9)
    monkeypatch.setattr("jaxlm.analysis.bench.measured_flops", lambda device, dtype: 3e10)
    preset = tmp_path / "small.py"
    preset.write_text("from tests.analysis.test_bench import experiment\n")  # whose programs are compiled there
    assert main(["plan", str(preset), "--json"]) == 0
    p = json.loads(capsys.readouterr().out)
    assert p["fits"] and p["topology"] is None
    flops, accessed = p["executed_flops_per_chip"] * p["devices"], p["bytes_accessed_per_chip"] * p["devices"]
    assert flops >= p["flops_per_step"] > 0
    assert accessed > 3 * 2 * 4 * p["parameters"]  # AdamW reads and writes parameters and two moments
    assert p["predicted_step_seconds"] == pytest.approx(flops / 3e10 + accessed / 5e9)
    assert p["predicted_bound"] == ("memory" if accessed / 5e9 > flops / 3e10 else "compute")
    assert p["relative_error"] == pytest.approx(p["predicted_step_seconds"] / p["measured_step_seconds"] - 1)
    assert p["hbm_bytes_per_chip"] == sum(p["hbm_by_kind"].values())

    monkeypatch.setattr("jaxlm.analysis.local._memory", lambda device: 1000)
    monkeypatch.setattr("jaxlm.analysis.local.bench_pretraining", None)  # nothing runs that does not fit
    assert main(["plan", str(preset)]) == 0
    out = capsys.readouterr().out
    assert "It does not fit: " in out and "Measured" not in out


def test_search_and_price_need_a_topology(capsys):
    for flags in (["--search"], ["--price", "2"]):
        assert main(["plan", "configs/bert_tiny.py", *flags]) == 2
        assert f"{flags[0]} needs a --topology" in capsys.readouterr().err
