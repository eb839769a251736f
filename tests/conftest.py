"""What every test shares: the CPU, one compilation cache that outlives the session, and a cache of texts that does not.

All of it is set in the environment, so that processes which a test starts have it too.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.metadata
import importlib.util
import operator
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import jaxtyping
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_compiled = os.environ.get("JAXLM_TEST_CACHE") or str(Path.home() / ".cache" / "jaxlm-tests")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _compiled)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
# Programs here run for milliseconds and compile for seconds: optimising them less halves the suite, XLA's older way of
# fusing takes a third off what is left. A flag that XLA does not know ends the process, so those two are for a version
# that is known to have them.
_flags = ["--xla_backend_optimization_level=0"]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    _flags += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
os.environ.setdefault("XLA_FLAGS", " ".join(_flags))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Tracing makes many short-lived objects, and PyTorch, Transformers and JAX keep many. To look for cycles among them as
# often as Python does by default took 22 of 328 CPU seconds in tests/huggingface; so rarely it takes 4.
gc.set_threshold(50_000, 20, 20)

if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit what their controller has set
    _session = tempfile.TemporaryDirectory(prefix="jaxlm-tests-")
    os.environ["JAXLM_CACHE"] = _session.name

# Shapes and dtypes that signatures state are checked on every call.
if importlib.util.find_spec("beartype"):
    import tests.typecheck  # noqa: F401 - the hook finds it by name

    names = ["ernie", "kagnet_network", "transe", "entity_autoencoder", "entity_vectors", "triple_ranking",
             "entity_corruption"]
    floors = ["jaxlm.corruption", "jaxlm.models", "jaxlm.objectives", *(f"jaxlm.knowledge.{name}" for name in names)]
    jaxtyping.install_import_hook(floors, "tests.typecheck.typechecked")


def pytest_collection_finish():
    """What is imported by now stays, and needs no search for cycles."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _shared_steps():
    from tests.training.shared_steps import share_steps

    share_steps()


@pytest.fixture
def curves() -> None:
    """Asked for by the tests whose runs are to draw curves.png."""


@pytest.fixture(autouse=True)
def _no_curves(request, monkeypatch):
    """To draw them takes as long as the rest of a small run."""
    if "curves" not in request.fixturenames:
        monkeypatch.setattr("jaxlm.analysis.curves.draw_curves", lambda run, report, token_losses=(): None)


@pytest.fixture(autouse=True, scope="module")
def _bounded_memory():
    """Drop compiled programs once they fill memory: the whole suite's take 8 GB a worker."""
    yield
    if _resident_bytes() > 3 * 2**30:
        import jax

        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # else the allocator keeps most of it


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm")  # Linux only
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else 0


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of real texts and tasks; tests that ask for it are skipped without it."""
    folder = Path(os.environ.get("JAXLM_DATA") or "missing")
    if not folder.is_dir():
        pytest.skip("the variable JAXLM_DATA names no folder")
    return folder


@pytest.fixture(scope="session")
def preset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.training.support import write_preset

    return write_preset(tmp_path_factory.mktemp("preset"))


@pytest.fixture(scope="session")
def _finished(preset: Path) -> Path:
    from jaxlm.cli import main

    run = preset.parent / "run"
    assert main(["pretrain", str(preset), "--run-dir", str(run), "--train.eval-every", "4"]) == 0
    return run


@pytest.fixture
def finished(_finished: Path, tmp_path: Path) -> Path:
    """A run of 12 steps with checkpoints and evaluations at 4, 8 and 12, to do with as one likes."""
    return Path(shutil.copytree(_finished, tmp_path / "run"))


def pytest_terminal_summary(terminalreporter):
    """How many inputs the fuzzer tried, and what became of them; the table of faults."""
    ends = [r for reports in terminalreporter.stats.values() for r in reports if getattr(r, "when", "") == "teardown"]
    found = [dict(report.user_properties) for report in ends if "fuzzed" in dict(report.user_properties)]
    if found:
        total = sum((Counter(one["fuzzed"]) for one in found), Counter())
        hangs = sum(number for what, number in total.items() if what.startswith("Hang"))
        wrong = sum(number for what, number in total.items() if not what.startswith("exit code"))
        peak = max(one["peak"] for one in found) / 2**30
        terminalreporter.write_line(
            f"{total.total():,} inputs: " + ", ".join(f"{n:,} {k}" for k, n in total.items())
            + f"; {wrong - hangs} tracebacks, {hangs} hangs, {peak:.1f} GiB at most"
        )
    faults = functools.reduce(operator.iadd, (dict(report.user_properties).get("faults", []) for report in ends), [])
    if faults:
        from tests.chaos.report import table

        terminalreporter.write_line(table(faults))
