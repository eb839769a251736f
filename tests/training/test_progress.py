"""What the user sees while training, where there is no terminal."""

from __future__ import annotations

from jaxlm.training import progress


def test_the_time_left_is_that_of_steps_without_the_first_which_compiles(monkeypatch, capsys):
    clock = iter([100.0, 110.0])  # the first step ends after 100 seconds, the tenth of the others 10 seconds later
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    shown = progress.Progress(steps=71, first=0)
    for step in (1, 11):
        shown.show(step, {"loss": 2.0, "mlm_accuracy": 0.5, "tokens_per_second": 1000.0})
    first, second = capsys.readouterr().out.splitlines()
    assert first == "step 1/71  loss 2.000  mlm accuracy 0.500  1,000 tokens/s"
    assert second == "step 11/71  loss 2.000  mlm accuracy 0.500  1,000 tokens/s  1:00 left"
