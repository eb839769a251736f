"""Which processes join others, by what their environment says; and which do not."""

from __future__ import annotations

import errno
import socket
import tempfile
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from etils import epath

from jaxlm.commands.common import remark_length, start_jax
from jaxlm.errors import UserError
from jaxlm.models.gpt2 import Gpt2
from jaxlm.parallel import hosts
from jaxlm.runs import folder
from jaxlm.tasks.evaluate import write_predictions
from tests.params import first_fast
from tests.training.support import Command

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NTASKS": "4", "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0"}
THREE = {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}
FOUND = ((), None)
KNOWN = (*hosts.PLACE, hosts.CLUSTER, "TPU_WORKER_HOSTNAMES", "MEGASCALE_COORDINATOR_ADDRESS", "OMPI_COMM_WORLD_SIZE",
         "SLURM_STEP_NUM_TASKS", hosts.JOIN_SECONDS, *STEP, *THREE)


@pytest.fixture
def started(monkeypatch, tmp_path):
    """The arguments and the bind address of each call of jax.distributed.initialize, in an environment that says
    nothing."""
    calls: list[tuple] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # of the lock, which this process holds to its end
    for name in (*KNOWN, "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)

    def initialize(*arguments, coordinator_bind_address, **options):
        calls.append((arguments, coordinator_bind_address))

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    return calls


@pytest.mark.parametrize(
    ("environment", "calls"),
    [
        ({}, []),
        ({"JAXLM_CLUSTER": "1"}, [FOUND]),  # a Cloud TPU VM, which has nothing else in its environment
        ({"JAXLM_CLUSTER": "0"}, []),
        ({"JAXLM_CLUSTER": ""}, []),
        (THREE | {"JAXLM_CLUSTER": "0"}, []),  # a second command in the environment of a run
        ({"TPU_WORKER_HOSTNAMES": "a,b", "JAXLM_CLUSTER": "0"}, []),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, [FOUND]),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, []),
        ({"MEGASCALE_COORDINATOR_ADDRESS": "host"}, [FOUND]),
        (STEP, [FOUND]),
        (STEP | {"SLURM_NTASKS": "1"}, []),
        (STEP | {"SLURM_NTASKS": "1", "JAXLM_CLUSTER": "1"}, []),  # alone it may take all GPUs of its node
        (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, []),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, []),  # the shell of salloc
        ({"OMPI_COMM_WORLD_SIZE": "4"}, [FOUND]),
        ({"OMPI_COMM_WORLD_SIZE": "4", "SLURM_NTASKS": "1"}, [FOUND]),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, []),
        (THREE, [(("host:1", 4, 2), None)]),
        (THREE | {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1"}, [(("127.0.0.1:1", 4, 2), "127.0.0.1:1")]),
        (THREE | STEP | {"SLURM_NTASKS": "1"}, [(("host:1", 4, 2), None)]),
        ({"JAX_COORDINATOR_ADDRESS": "host:1"}, [FOUND]),
    ],
)
def test_who_joins(started, monkeypatch, environment, calls):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    hosts.join_processes()
    assert started == calls


@pytest.mark.parametrize("other", [{"JAX_PROCESS_ID": "3"}, {"JAX_COORDINATOR_ADDRESS": "host:2"},
                                   {"OMPI_COMM_WORLD_RANK": "1"}])
def test_a_process_that_runs_already_joins_no_second_time(started, monkeypatch, other):
    """The coordination service would end the run; another process or job on the host joins."""
    for name, value in THREE.items():
        monkeypatch.setenv(name, value)
    hosts.join_processes()
    with pytest.raises(UserError, match=r"another jaxlm process of this cluster runs .* set JAXLM_CLUSTER=0 JAX_PLAT"):
        hosts.join_processes()
    assert len(started) == 1
    for name, value in other.items():
        monkeypatch.setenv(name, value)
    hosts.join_processes()
    assert len(started) == 2


def test_a_host_without_locks_joins(started, monkeypatch):
    monkeypatch.setattr(hosts.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "No locks")))
    monkeypatch.setenv(hosts.CLUSTER, "1")
    hosts.join_processes()
    hosts.join_processes()
    assert len(started) == 2


def test_joining_happens_once(started, monkeypatch):
    monkeypatch.setenv(hosts.CLUSTER, "1")
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    hosts.join_processes()
    assert started == []


def test_processes_on_cpus_speak_over_gloo(started, monkeypatch):
    before = jax.config.jax_cpu_collectives_implementation
    monkeypatch.setenv(hosts.CLUSTER, "1")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    try:
        hosts.join_processes()
        assert jax.config.jax_cpu_collectives_implementation == "gloo"
    finally:
        jax.config.update("jax_cpu_collectives_implementation", before)


@pytest.mark.parametrize("address", ["host", "host:abc", ":1"])
def test_an_address_without_a_port_is_a_mistake(started, monkeypatch, address):
    for name, value in (THREE | {"JAX_COORDINATOR_ADDRESS": address}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="it must be HOST:PORT"):
        hosts.join_processes()
    assert started == []


@pytest.mark.parametrize("count", [None, "four"])
def test_two_of_the_three_variables_are_a_mistake(started, monkeypatch, count):
    for name, value in (THREE | {"JAX_NUM_PROCESSES": count}).items():
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="JAX_NUM_PROCESSES must be too"):
        hosts.join_processes()
    assert started == []


def test_a_wait_that_is_no_number_is_a_mistake(started, monkeypatch):
    for other, told in (THREE | {hosts.JOIN_SECONDS: "soon"}).items():
        monkeypatch.setenv(other, told)
    with pytest.raises(UserError, match="must be a whole number of seconds"):
        hosts.join_processes()
    assert started == []


def test_a_cluster_that_jax_cannot_find_is_one_sentence(started, monkeypatch):
    def fails(*arguments, **options):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", fails)
    monkeypatch.setenv(hosts.CLUSTER, "1")
    with pytest.raises(UserError, match="cannot find the others"):
        hosts.join_processes()


@pytest.mark.parametrize(("error", "words"), [
    (RuntimeError("no devices.\nand more"), r"no devices\."),
    (AssertionError(), r"JAX_PLATFORMS=cpu has no plugin; install jaxlm's extra for it\."),
])
def test_what_jax_says_of_its_devices_is_one_sentence(started, monkeypatch, error, words):
    def fails(*arguments, **options):
        raise error

    monkeypatch.setattr(jax.distributed, "initialize", fails)
    monkeypatch.setenv(hosts.CLUSTER, "1")
    with pytest.raises(UserError, match=f"jax cannot start its devices: {words}$"):
        start_jax()


def test_a_cluster_that_is_not_complete_is_given_up(started, monkeypatch, capsys):
    """jax's own timeout would abort the process."""
    given_up = threading.Event()
    monkeypatch.setattr(hosts.os, "_exit", lambda code: code == 1 and given_up.set())
    monkeypatch.setattr(jax.distributed, "initialize", lambda **options: given_up.wait(20))  # as jax waits
    monkeypatch.setenv(hosts.CLUSTER, "1")
    monkeypatch.setenv(hosts.JOIN_SECONDS, "1")
    hosts.join_processes()
    assert given_up.is_set() and "others of its cluster; gave up after 1 s" in capsys.readouterr().err


def test_a_host_of_a_slice_that_waits_for_the_others_says_so(started, monkeypatch, capsys):
    """libtpu would wait without a line."""
    given_up = threading.Event()
    monkeypatch.setattr(hosts.os, "_exit", lambda code: code == 1 and given_up.set())
    monkeypatch.setattr(jax, "devices", lambda: given_up.wait(20))
    monkeypatch.setenv(hosts.JOIN_SECONDS, "1")
    start_jax()
    said = capsys.readouterr().err
    assert given_up.is_set() and "on a TPU slice of several hosts all must start; gave up after 1 s" in said


def test_hosts_that_have_not_joined_are_told_to(started, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(UserError, match="this slice has 4 hosts, which jaxlm has not joined; set JAXLM_CLUSTER=1"):
        start_jax()


def test_a_port_that_is_taken_is_a_mistake(tmp_path, preset):
    """As by another process 0."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = "{}:{}".format(*server.getsockname())
        command = Command(
            ["pretrain", preset, "--run-dir", tmp_path / "run"], tmp_path / "log", JAX_COORDINATOR_ADDRESS=address,
            JAX_NUM_PROCESSES="2", JAX_PROCESS_ID="0", JAXLM_JOIN_SECONDS="20",
        )
        assert command.wait() == 2 and "Address already in use" in command.output


@pytest.mark.parametrize(("index", "said"), first_fast([
    (0, "process 0 of 2 waits for the others at {address}"),
    (1, "process 1 of 2 waits for process 0 at {address}"),
]))
def test_a_process_that_is_alone_gives_up(tmp_path, preset, index, said):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = "{}:{}".format(*probe.getsockname())
    command = Command(
        ["pretrain", preset, "--run-dir", tmp_path / "run"], tmp_path / "log", JAX_COORDINATOR_ADDRESS=address,
        JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(index), JAXLM_JOIN_SECONDS="1",
    )
    assert command.wait() == 1
    said = "jaxlm: " + said.format(address=address)
    first, second = command.output.splitlines()
    assert first == f"{said}; waiting up to 1 s (JAXLM_JOIN_SECONDS)." and second.startswith(f"{said}; gave up after 1")


def test_only_the_first_process_checks_and_writes_an_output(monkeypatch, tmp_path):
    """On a host of its own, another one may lack the folder, or have the file of an earlier command."""
    path = tmp_path / "missing" / "out.jsonl"
    for action in (lambda: hosts.check_main_output(path, "--predictions"), lambda: write_predictions(path, [{}])):
        with pytest.raises(UserError, match="cannot be written"):
            action()
        with monkeypatch.context() as patch:
            patch.setattr(jax, "process_index", lambda: 1)
            action()


@pytest.mark.parametrize("index", [0, 1])
def test_all_wait_for_what_the_others_do_after_the_first(monkeypatch, index):
    """So that none goes on alone where another one has failed."""
    waits = []
    monkeypatch.setattr(jax, "process_index", lambda: index)
    monkeypatch.setattr(hosts, "together", lambda action, reason: waits.append(reason) or action())
    assert hosts.main_first(lambda: 3, "write") == 3
    assert waits == ["process 0 to write", "the others to write"]


def test_the_first_process_remarks_on_a_length(monkeypatch, capsys):
    model = SimpleNamespace(objective=SimpleNamespace(model=SimpleNamespace(text_model=Gpt2(max_positions=64))))
    remark_length(65, model)
    assert "at most 64 tokens" in capsys.readouterr().err
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    remark_length(65, model)
    assert not capsys.readouterr().err


def test_differences_name_the_odd_process():
    alike = {"host": "a", "devices": "4 TPU v5e", "jax": "0.10.2"}
    hosts._refuse_differences([alike, alike | {"host": "b"}])
    with pytest.raises(UserError) as error:
        hosts._refuse_differences([alike, alike | {"host": "b", "jax": "0.10.1"}, alike | {"host": "c", "jax": "0.9"}])
    assert "(jax: 0.10.1 in process 1 on b and 1 more, 0.10.2 in the others)" in str(error.value)
    with pytest.raises(UserError, match=r"e/one in process 1 on a, .*e/two in the other"):
        hosts._refuse_differences([{"host": "a", "source": 90 * "e" + end} for end in ("/two", "/one")])


def test_a_folder_is_shared_where_its_files_are_seen_and_written(tmp_path, monkeypatch):
    """A network filesystem shows a new file late; another machine's folder of the same name never has it."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(hosts, "from_main", lambda value: "token")
    monkeypatch.setattr(hosts, "main_first", lambda action, *_, **__: None)
    monkeypatch.setattr(hosts.multihost_utils, "process_allgather", lambda value: np.array([True, value]))
    file = epath.Path(tmp_path) / ".shared-token"
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", lambda s: waited.append(s) or (len(waited) == 3 and file.write_text("")))
    hosts.require_shared(epath.Path(tmp_path), "--run-dir")
    assert len(waited) == 3 and not file.exists()  # process 0 removes it
    file.write_text("")
    for access in (lambda *_: False, lambda *_: (_ for _ in ()).throw(OSError)):
        monkeypatch.setattr(hosts.os, "access", access)
        with pytest.raises(UserError, match=r"process 1 does not see .*, or may not write there; .* one --run-dir"):
            hosts.require_shared(epath.Path(tmp_path), "--run-dir")
        file.write_text("")


def test_a_filesystem_without_locks_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(folder.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "No locks")))
    with folder.lock(tmp_path) as handle:
        assert not handle.closed and "has no locks (No locks)" in capsys.readouterr().err


def test_a_wait_says_what_it_waits_for_and_ends(monkeypatch, capsys):
    ended = threading.Event()
    monkeypatch.setattr(hosts, "LOG_SECONDS", 1)
    monkeypatch.setattr(hosts.os, "_exit", lambda code: code == 1 and ended.set())
    monkeypatch.setattr("orbax.checkpoint.multihost.get_barrier_sync_fn", lambda: lambda **wait: ended.wait(20))
    monkeypatch.setenv(hosts.WAIT_SECONDS, "2")
    monkeypatch.setattr(hosts.jax, "process_count", lambda: 2)
    monkeypatch.setattr(hosts.multihost_utils, "process_allgather", lambda code: np.array([code, code]))
    hosts.together(lambda: None, "process 0 to prepare the text")
    said = capsys.readouterr().err.splitlines()
    assert ended.is_set() and len(said) == 2 and "gave up after 2 s" in said[1]
    assert said[0] == (
        "jaxlm: process 0 waits for process 0 to prepare the text, 1 s so far of up to 2 (JAXLM_WAIT_SECONDS)."
    )
