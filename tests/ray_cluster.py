"""A Ray cluster of loopback nodes, which the tests of a process share. Needs .venv-ray, which `./test --all` makes."""

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from free_ports import free_port

ROOT = Path(__file__).parents[1]
HAS_RAY = importlib.util.find_spec("ray") is not None
NODES = ("127.0.0.2", "127.0.0.3")  # Ray replaces 127.0.0.1 by the host's address
FURTHER_NODE = "127.0.0.4"
START_S = 120
# Loss of a node is noticed after 3 s instead of 30 s.
HEALTH = {"PERIOD_MS": "1000", "TIMEOUT_MS": "1000", "FAILURE_THRESHOLD": "3", "INITIAL_DELAY_MS": "1000"}


class Cluster(NamedTuple):
    """A running cluster.

    Attributes:
      environment: of a driver.
      folder: of its files, a part of the command lines of its nodes.
      processes: of its nodes, by their addresses.
    """

    environment: dict[str, str]
    folder: str
    processes: dict[str, subprocess.Popen[bytes]]

    def add(self, ip, *words, cpus=2):
        """Start a node."""
        log = Path(self.folder, f"{ip}.log")
        command = ["ray", "start", f"--node-ip-address={ip}", *words, f"--num-cpus={cpus}", "--block"]
        command += ["--object-store-memory=100000000", "--disable-usage-stats"]
        with open(log, "w") as file:
            self.processes[ip] = subprocess.Popen(command, env=self.environment, stdout=file, stderr=file)
        assert wait_until(lambda: "Ray runtime started" in log.read_text(), START_S), log.read_text()

    def further_node(self):
        """Start a node that a test may lose."""
        self.add(FURTHER_NODE, f"--address={self.environment['RAY_ADDRESS']}")

    def lose_further_node(self):
        """Kill all processes of that node at once."""
        node = self.processes.pop(FURTHER_NODE)
        for pid in [pid for pid in processes_with(self.folder) if FURTHER_NODE in command_of(pid)]:
            for child in [pid, *children_of(pid)]:
                with contextlib.suppress(OSError):
                    os.kill(child, signal.SIGKILL)
        node.kill()
        node.wait()

    def generators(self):
        """Processes of generators that run."""
        nodes = processes_with(self.folder)
        actors = processes_with("ray::GeneratorActor")
        return [pid for pid in actors if parent_of(pid) in nodes]


def on_ray(function):
    """Mark a test that needs a cluster."""
    skip = pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed: ./test --all makes .venv-ray for it")
    for mark in (skip, pytest.mark.slow, pytest.mark.gloo):
        function = mark(function)
    return function


@contextlib.contextmanager
def open_cluster():
    """Start a cluster of two nodes with two CPUs each, and end all of its processes."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: paths of sockets have at most 107 characters
    address = f"{NODES[0]}:{free_port(20_000, 30_000)}"
    variables = {name: text for name, text in os.environ.items() if name not in ("RAY_ADDRESS", "RANK", "WORLD_SIZE")}
    modules = [str(ROOT / name) for name in ("", "tests", "tests/trainer")]  # of the pieces of a job, imported by name
    modules += filter(None, [os.environ.get("PYTHONPATH")])
    variables |= {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": os.pathsep.join(modules), "OMP_NUM_THREADS": "1"}
    variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables |= {f"RAY_health_check_{name.lower()}": text for name, text in HEALTH.items()}
    cluster = Cluster(variables | {"RAY_ADDRESS": address}, folder, {})
    try:
        head = ["--head", f"--port={address.partition(':')[2]}", "--include-dashboard=false", f"--temp-dir={folder}"]
        del cluster.environment["RAY_ADDRESS"]  # a head takes none
        cluster.add(NODES[0], *head)
        cluster.add(NODES[1], f"--address={address}")
        cluster.environment["RAY_ADDRESS"] = address
        yield cluster
    finally:
        for node in reversed(cluster.processes.values()):
            node.terminate()
        for node in cluster.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(30)
        gone = wait_until(lambda: not processes_with(folder), 30)
        for pid in processes_with(folder):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
    assert gone


def processes_with(text):
    """Ids of the processes whose command line or folder of work has a text."""
    ids = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and text in (folder / "cmdline").read_bytes().decode(errors="replace"):
                ids.append(int(folder.name))
    return [pid for pid in ids if pid != os.getpid()]


def wait_until(condition, seconds):
    """The condition's value once it is true, or after some seconds."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def command_of(pid):
    """The command line of a process; "" if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""


def parent_of(pid):
    """The parent of a process; 0 if it has ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return 0


def children_of(pid):
    """The processes that a process has started."""
    ids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    return [child for child in ids if parent_of(child) == pid]
