"""Which processes join others, by what their environment says; and which do not."""

from __future__ import annotations

import socket
import struct
import threading
from pathlib import Path

import jax
import pytest

from jaxlm.commands.common import start_jax
from jaxlm.errors import UserError
from jaxlm.parallel import hosts

LAUNCH = Path(__file__).parents[2] / "launch"
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NTASKS": "4", "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0"}
THREE = {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}
FOUND = ("relay of found:2", 4, 1)
KNOWN = (hosts.CLUSTER, "TPU_WORKER_HOSTNAMES", "MEGASCALE_COORDINATOR_ADDRESS", "OMPI_COMM_WORLD_SIZE",
         "SLURM_STEP_NUM_TASKS", *STEP, *THREE)


@pytest.fixture
def started(monkeypatch):
    """The arguments of each call of jax.distributed.initialize, in an environment that says nothing. What it does not
    say, jax finds out: the second of four processes."""

    def detect(address, count, index, devices, method, timeout):
        return address or "found:2", count or 4, 1 if index is None else index, devices

    calls: list[tuple] = []
    for name in (*KNOWN, "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *arguments, **_: calls.append(arguments))
    monkeypatch.setattr(hosts.atexit, "register", lambda *arguments: None)
    monkeypatch.setattr(hosts, "_watch", lambda leaving: None)
    monkeypatch.setattr(hosts, "_relay", lambda address, folder, when_broken: f"relay of {address}")
    monkeypatch.setattr(hosts.ClusterEnv, "auto_detect_unset_distributed_params", detect)
    return calls


@pytest.mark.parametrize(
    ("environment", "calls"),
    [
        ({}, []),
        ({"JAXLM_CLUSTER": "1"}, [FOUND]),  # a Cloud TPU VM, which has nothing else in its environment
        ({"JAXLM_CLUSTER": "0"}, []),
        ({"JAXLM_CLUSTER": ""}, []),
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
        (THREE, [("relay of host:1", 4, 2)]),
        (THREE | {"JAX_PROCESS_ID": "0"}, [("host:1", 4, 0)]),  # where the coordinator is
        (THREE | STEP | {"SLURM_NTASKS": "1"}, [("relay of host:1", 4, 2)]),
        ({"JAX_COORDINATOR_ADDRESS": "host:1"}, [("relay of host:1", 4, 1)]),
    ],
)
def test_who_joins(started, monkeypatch, environment, calls):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    hosts.join_processes()
    assert started == calls


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


def test_a_relay_tells_which_end_hung_up(tmp_path):
    """Process 0 is lost when its end breaks; not when jax closes a connection, or finds nobody yet."""
    broken = threading.Event()

    def connected() -> socket.socket:
        jax_side = socket.socket(socket.AF_UNIX)
        jax_side.settimeout(20)
        jax_side.connect(address.removeprefix("unix:"))
        return jax_side

    def pair() -> tuple[socket.socket, socket.socket]:
        jax_side, coordinator_side = connected(), coordinator.accept()[0]
        coordinator_side.settimeout(20)
        jax_side.sendall(b"ping")
        assert coordinator_side.recv(9) == b"ping"
        coordinator_side.sendall(b"pong")
        assert jax_side.recv(9) == b"pong"
        return jax_side, coordinator_side

    with socket.create_server(("127.0.0.1", 0)) as coordinator:
        coordinator.settimeout(20)
        address = hosts._relay("{}:{}".format(*coordinator.getsockname()), tmp_path, broken.set)
        jax_side, coordinator_side = pair()
        jax_side.close()
        assert coordinator_side.recv(9) == b"" and not broken.wait(0.2)
        coordinator_side.close()
        jax_side, coordinator_side = pair()
        reset = struct.pack("ii", 1, 0)  # as of a process that is killed: no goodbye
        coordinator_side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        coordinator_side.close()
        assert jax_side.recv(9) == b"" and broken.is_set()
        jax_side.close()
    broken.clear()
    with connected() as jax_side:
        assert jax_side.recv(9) == b"" and not broken.is_set()


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


def test_a_cluster_that_jax_cannot_find_is_one_sentence(started, monkeypatch):
    def fails(*arguments, **options):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setenv(hosts.CLUSTER, "1")
    monkeypatch.setattr(hosts.ClusterEnv, "auto_detect_unset_distributed_params", lambda *given: given[:4])
    with pytest.raises(UserError, match="cannot find the others"):
        hosts.join_processes()
    monkeypatch.setattr(jax.distributed, "initialize", fails)
    for name, value in THREE.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="jax cannot start its devices: coordinator_address should be defined"):
        start_jax()


@pytest.mark.parametrize("name", ["tpu_pod.sh", "gke.yaml", "slurm.sbatch"])
def test_what_starts_several_processes_says_so(name):
    text = (LAUNCH / name).read_text()
    assert "JAXLM_CLUSTER=1" in text or '{name: JAXLM_CLUSTER, value: "1"}' in text


def test_a_task_of_slurm_sees_all_gpus_of_its_node():
    """jax gives each task the one with its local number, which would not be there among one."""
    lines = (LAUNCH / "slurm.sbatch").read_text().splitlines()
    options = dict(line.removeprefix("#SBATCH --").split("=", 1) for line in lines if line.startswith("#SBATCH --"))
    assert options["gpus-per-node"] == options["ntasks-per-node"] and "gpus-per-task" not in options
