"""What the user sees while training, where there is no terminal."""

from __future__ import annotations

from jaxlm.training import progress


def test_the_time_left_is_that_of_steps_without_the_first_which_compiles(monkeypatch, capsys):
    clock = iter([100.0, 110.0])  # the first step ends after 100 seconds, the tenth of the others 10 seconds later
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    shown = progress.Progress(steps=71, after_step=0)
    for step in (1, 11):
        shown.show(step, {"loss": 2.0, "mlm_accuracy": 0.5, "learning_rate": 1e-4, "tokens_per_second": 1e3})
    first, second = capsys.readouterr().out.splitlines()
    assert first == "step 1/71  loss 2.000  mlm accuracy 0.500  learning rate 1.00e-04  1,000 tokens/s"
    assert second == "step 11/71  loss 2.000  mlm accuracy 0.500  learning rate 1.00e-04  1,000 tokens/s  0:01:00 left"


def test_lines_scroll_above_a_bar_that_disappears(monkeypatch):
    """On a terminal, 80 columns wide: the bar takes what is left of the line, and the history stays."""
    import io

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    import rich

    monkeypatch.setattr(rich, "_console", None)
    with progress.Progress(steps=3, after_step=0) as shown:
        for step in (1, 2, 3):
            shown.show(step, {"loss": 4.0 - step, "learning_rate": 1e-4, "tokens_per_second": 1000.0})
        shown.note("Finished")
    said = screen.getvalue()
    for line in ("step 1/3  loss 3.000", "step 2/3  loss 2.000", "step 3/3  loss 1.000", "Finished"):
        assert said.count(line) == 1
    bar = max((line for line in said.replace("\r", "\n").split("\n") if "━" in line), key=len)
    assert bar.count("━") + bar.count("╸") + bar.count("╺") > 40
    assert said.rstrip("\n").endswith("\x1b[2K"), "the bar is erased"
