"""Random faults over runs of 1, 2 and 4 processes, on a disk and in an emulated bucket: each run ends with the
parameters of the undisturbed one. Run it with `./launch/test.sh -m chaos`; JAXLM_CHAOS=N is the number of faults,
JAXLM_SEED=N draws others. JAXLM_CHAOS_REPORT=FOLDER keeps what became of each run; finished ones are not repeated.
"""

from __future__ import annotations

import functools
import json
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxlm.runs.load import load_run
from tests.chaos.faults import FAULTS, SAVING, STARTING
from tests.chaos.proxy import Proxy
from tests.chaos.report import Record
from tests.chaos.run import STEPS, Failed, Place, Run
from tests.training.servers import free_port, serve_gcs
from tests.training.support import metadata, metrics, small_disk, write_preset, write_text

COUNT = int(os.environ.get("JAXLM_CHAOS", "200"))
SEED = int(os.environ.get("JAXLM_SEED", "0"))
REPORT = os.environ.get("JAXLM_CHAOS_REPORT")
PER_RUN = 5
KINDS = [(1, "disk"), (2, "bucket"), (1, "bucket"), (4, "disk"), (1, "disk"), (2, "disk"), (1, "bucket"), (4, "bucket")]
"""Numbers of processes, and places, of the runs in turn."""
RUNS = {
    f"{number}-{place}-{processes}": (number, processes, place)
    for number in range(-(-COUNT // PER_RUN)) for processes, place in [KINDS[number % len(KINDS)]]
}
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600)]


@pytest.fixture(scope="session")
def bucket(tmp_path_factory) -> Iterator[tuple[Path, Proxy]]:
    """The files of an emulated bucket, and the proxy before it."""
    folder, port = tmp_path_factory.mktemp("bucket"), free_port()
    with Proxy(0, port) as proxy:
        for _ in serve_gcs(folder, port, proxy.server_address[1]):
            yield folder / "bucket", proxy
        proxy.shutdown()


@pytest.fixture
def place(request, tmp_path) -> Iterator[Place]:
    """Where the run is."""
    number, _, kind = RUNS[request.node.callspec.params["name"]]
    if kind == "bucket":
        files, proxy = request.getfixturevalue("bucket")
        (files / str(number)).mkdir()
        yield Place(files / str(number), f"gs://bucket/{number}", proxy)
    else:
        with small_disk(tmp_path / "disk", "64m") as is_small:
            if not is_small:
                warnings.warn("No small disk can be mounted here: no fault fills it.", stacklevel=1)
            yield Place(tmp_path / "disk", str(tmp_path / "disk"), is_small=is_small)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """Function from a number of processes to the folder of a run of theirs, made at the first call."""

    @functools.cache
    def make(processes: int) -> Path:
        folder = tmp_path_factory.mktemp("undisturbed")
        run = new_run(Place(folder, str(folder)), processes, 0)
        run.start()
        while run.wait_for_progress():
            pass
        assert run.has_finished(), run.output()
        return run.folder

    return make


def new_run(place: Place, processes: int, number: int) -> Run:
    place.upload(write_text(place.files / "text.txt", documents=1500))
    logs = place.files.parent / f"logs-{place.files.name}"
    logs.mkdir()
    return Run(place, write_preset(logs, place.files / "text.txt"), logs, processes, random.Random(f"{SEED} {number}"))


@pytest.mark.parametrize("name", RUNS)
def test_faults(name, request, record_property):
    number, processes, _ = RUNS[name]
    file = Path(REPORT) / f"{SEED}-{name}.json" if REPORT else None
    records: list[Record] = json.loads(file.read_text()) if file and file.exists() else []
    record_property("faults", records)
    if records and all(record["end"] == "same" for record in records):
        return
    records.clear()
    run = new_run(request.getfixturevalue("place"), processes, number)
    undisturbed = request.getfixturevalue("undisturbed")
    try:
        for _ in range(min(PER_RUN, COUNT - number * PER_RUN)):
            disturb(run, records, undisturbed)
        finish(run, records, undisturbed)
    finally:
        run.kill()
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps([{"seed": SEED, "run": name} | record for record in records], indent=1))


def disturb(run: Run, records: list[Record], undisturbed: Callable[[int], Path]) -> None:
    """Draw a fault, wait for its moment, let it happen, and wait until the run has ended or goes on."""
    fault = run.draw.choice([fault for fault in FAULTS if fault.applies(run)])
    moment = run.draw.choice(fault.moments)
    while True:
        if run.has_finished():
            finish(run, records, undisturbed)
            run.renew()
        is_new = not run.alive()
        if is_new:
            run.start()
        if is_new and moment == STARTING:
            time.sleep(run.draw.uniform(0, 4))
            break
        if trains(run, records):
            break
        ended_late(run, records)
    if moment == SAVING:
        run.wait_until(run.is_saving)
    start = time.monotonic()
    record = {"processes": run.processes, "kind": fault.name, "moment": moment, "outcome": "failed", "sentence": "",
              "time": start, "seconds": None, "end": "failed"}
    records.append(record)
    fault.act(run)
    if fault.ends:
        run.wait_until(lambda: False)
    went_on = (not fault.ends and trains(run, records)) or run.has_finished()
    record |= {"outcome": "went on" if went_on else "ended", "sentence": "" if went_on else run.check_end()}


def trains(run: Run, records: list[Record]) -> bool:
    """Wait for the next checkpoint, which ends the recovery from the last fault; return False if the run has ended."""
    goes_on = run.wait_for_progress()
    if goes_on and records and records[-1]["seconds"] is None:
        records[-1]["seconds"] = round(time.monotonic() - records[-1]["time"], 1)
    return goes_on


def ended_late(run: Run, records: list[Record]) -> None:
    """Take the end of a run that had gone on for a while as the outcome of the last fault; another end is a failure."""
    if run.has_finished():
        return
    if not records or records[-1]["outcome"] != "went on":
        raise Failed(f"it ended by itself\n{run.output()}")
    records[-1] |= {"outcome": "ended", "sentence": run.check_end(), "seconds": None}


def finish(run: Run, records: list[Record], undisturbed: Callable[[int], Path]) -> None:
    """Let the run come to its end, and compare it with the undisturbed one."""
    while not run.has_finished():
        if not run.alive():
            run.start()
        if not trains(run, records):
            ended_late(run, records)
    ours, theirs = run.folder, undisturbed(max(run.meshes))
    if len(run.meshes) == 1:  # on one mesh all the time
        assert metadata(ours, STEPS)["checksums"] == metadata(theirs, STEPS)["checksums"]
        assert metrics(ours) == metrics(theirs)
    else:
        one, other = load_run(ours).params, load_run(theirs).params
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), one, other)
    for record in records:
        record["end"] = "same"
