"""Resumption bit for bit in the programs that users run: the rest of the suite compiles without optimizations."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = (
    "training/test_run.py::test_stopping_anywhere_changes_nothing",
    "training/test_average.py::test_a_stop_changes_nothing",
    "training/test_contrastive.py::test_a_stop_changes_nothing_and_chunks_may_change",
    "training/test_faults.py::test_killed_twice",
    "training/test_feed.py::test_a_run_that_is_resumed_twice_is_the_run_in_one_piece",
    "training/test_frozen.py::test_stopping_a_student_changes_nothing",
    "training/test_masked_diffusion.py::test_a_stop_changes_nothing",
    "training/test_mixture_run.py::test_stopping_anywhere_changes_nothing",
    "training/test_skip.py::test_stopping_among_skipped_steps_changes_nothing",
    "training/test_init_from.py::test_killed_early_it_begins_again_from_the_source",
)


@pytest.mark.slow
def test_ten_tests_of_resumption_at_the_default_optimization_level():
    """conftest.py sets XLA's flags only where the variable is missing. The process has a cache of texts of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "", *(f"tests/{test}" for test in TESTS)],
        env=environment | {"XLA_FLAGS": ""}, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
    )
    assert found.returncode == 0 and found.stdout.startswith("." * len(TESTS)), found.stdout[-4000:]
