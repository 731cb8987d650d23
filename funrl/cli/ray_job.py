"""The command `funrl ray`: a run on nodes of a Ray cluster, started with torchrun's ranks.

    funrl ray --nodes=2 -- grpo --mesh=dp16 --run_dir=SHARED/runs/first

Ray reserves the devices of the ranks, one actor on each node starts torchrun's agent there, and this process relays
lines, signals and the exit status. The command line is checked before the cluster is asked for anything.
"""

from __future__ import annotations

import importlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, Any, NamedTuple

from funrl.cli.command import read_command, with_models
from funrl.cli.doctor import experiment_of
from funrl.cli.line import program_words, read_words
from funrl.cli.usages import COMMANDS
from funrl.mesh.text import devices
from funrl.rollout.ray.cluster import devices_of_cluster
from funrl.trainer.settings.declaration import Flag, SettingsError, at_least, refusing
from funrl.trainer.settings.settings import Settings

LINES_S = 0.2  # longest wait of an actor for lines
NOTE_S = 5.0  # wait for resources after which a line says so
FAILURE_S = 150.0  # from the failure of a node to the SIGTERM of the others, which save meanwhile
READERS_S = 5.0  # wait for the last lines of an agent that has ended

RAY_FLAGS = (
    Flag("nodes", 1, int, optional=False, text="nodes, each with the same number of ranks", bounds=(at_least(1),)),
    Flag("address", "auto", str, optional=False, text="address of the cluster"),
    Flag("timeout", 30, int, optional=False, text="minutes to wait for the devices", bounds=(at_least(0),)),
    Flag(
        "shutdown_timeout",
        600,
        int,
        optional=False,
        text="seconds from SIGTERM to SIGKILL of the ranks",
        bounds=(at_least(1),),
    ),
)


class DeviceRequest(NamedTuple):
    """Devices that a job asks for.

    Attributes:
      nodes: number of nodes.
      ranks: number of ranks of a node.
      resource: Ray's name of a rank's device, "GPU" or "CPU".
    """

    nodes: int
    ranks: int
    resource: str

    def __str__(self) -> str:
        return f"{self.nodes} node{'s' * (self.nodes > 1)} with {self.ranks} {self.resource} each"


class ResourceError(Exception):
    """A cluster without the devices of a job; the message says what is missing."""


class NodeActor:
    """Actor on a node of the job: it starts torchrun's agent and hands over what that prints.

    Ray runs its methods in the main thread, one at a time.

    Example:
      node = ray.remote(NodeActor).options(num_gpus=8).remote(os.getcwd(), None)
      host, address, port = ray.get(node.describe.remote())
      node.start.remote(["--nproc-per-node=8", "-m", "funrl", "grpo", "--mesh=dp8"])
      lines, status = ray.get(node.poll.remote())
    """

    def __init__(self, folder: str, threads: str | None) -> None:
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"there is no {folder} on {socket.gethostname()}, where the job was started")
        self.folder = folder
        # Ray has set the variable to the actor's cores; torchrun's default is meant unless the driver has its own.
        self.environment = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
        self.environment["RAY_ADDRESS"] = importlib.import_module("ray").get_runtime_context().gcs_address
        if threads is not None:
            self.environment["OMP_NUM_THREADS"] = threads
        self.lines: queue.Queue[tuple[bool, str]] = queue.Queue()

    def describe(self) -> tuple[str, str, int]:
        """Name of the host, address of the node and a free port there."""
        address = importlib.import_module("ray").util.get_node_ip_address()
        with socket.create_server((address, 0)) as listener:
            return socket.gethostname(), address, listener.getsockname()[1]

    def start(self, words: Sequence[str]) -> None:
        """Start torchrun with these arguments."""
        guard = [sys.executable, "-m", "funrl.processes.guard"]
        self.agent = subprocess.Popen(
            [*guard, sys.executable, "-m", "torch.distributed.run", *words],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ray may kill the group of its worker
        )
        streams = ((self.agent.stdout, False), (self.agent.stderr, True))
        self.readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in streams]
        for reader in self.readers:
            reader.start()

    def poll(self) -> tuple[list[tuple[bool, str]], int | None]:
        """Lines since the last call, each with True if of stderr, and the exit status; None: the agent runs."""
        status = self.agent.poll()
        lines = []
        if status is None and self.lines.empty():
            try:
                lines.append(self.lines.get(timeout=LINES_S))
            except queue.Empty:
                return [], None
        elif status is not None:
            for reader in self.readers:
                reader.join(READERS_S)
        while not self.lines.empty():
            lines.append(self.lines.get())
        return lines, status

    def signal(self, number: int) -> None:
        """Send the agent a signal, which it forwards to its ranks."""
        self.agent.send_signal(number)

    def _read(self, stream: IO[str], is_error: bool) -> None:
        for line in stream:
            self.lines.put((is_error, line.rstrip("\n")))


def ray_command(argv: Sequence[str]) -> int:
    """Run `funrl ray ... -- COMMAND ...`; return the exit status.

    Args:
      argv: "ray" and its arguments.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    usage = COMMANDS["ray"].usage
    _, line = read_words(RAY_FLAGS, argv[:end], usage, least=0, most=0)
    words = [*argv[end + 1 :]]
    words = program_words(words[1:] if words[:1] == ["funrl"] else words, usage)
    program = [f"funrl {words[0]}", *words[1:]]
    command = read_command(experiment_of(words[0]), program, writes=True)
    if command.settings.estimate.dry_run:  # which needs no cluster
        from funrl.cost.report import dry_run

        print(dry_run(with_models(command).settings, command.compose, program))
        return 0
    request = device_request(command.settings, line.values["nodes"])
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise ImportError(f"funrl ray needs Ray: pip install 'funrl[ray]' ({error})") from error
    address = line.values["address"]
    advice = "; `ray start --head` starts one"
    with refusing(f"--address={address}: no Ray cluster answers: ", ConnectionError, RuntimeError, ending=advice):
        ray.init(address=address, log_to_driver=False, logging_level="error")
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):  # after Ray's own handlers
        signal.signal(number, lambda number, _: signals.append(number))
    try:
        group = reserve(request, 60.0 * line.values["timeout"], signals)
        if signals:
            print("nothing was started", file=sys.stderr)
            return 128 + signals[0]
        return _run(start_nodes(request, group, line.values["shutdown_timeout"], words), signals)
    except (ResourceError, ray.exceptions.RayError) as error:
        print(f"error: {str(error).strip()}", file=sys.stderr)
        return 1
    finally:
        ray.shutdown()


def device_request(settings: Settings, nodes: int) -> DeviceRequest:
    """Devices of a run on a number of nodes.

    Raises:
      SettingsError: its ranks do not fit the nodes, or Ray starts no ranks for it.
    """
    if settings.devices.device not in (None, "cpu", "cuda"):
        raise SettingsError(f"--device={settings.devices.device}: `funrl ray` places GPUs and CPUs; use cuda or cpu")
    placement = settings.devices.placement
    ranks = devices(settings.devices.train.sizes) if placement is None else placement.world
    if ranks % nodes:
        raise SettingsError(
            f"--nodes={nodes}: the run has {ranks} ranks, which are not the same number on each node; "
            f"choose --nodes that divides {ranks}, or another --mesh"
        )
    return DeviceRequest(nodes, ranks // nodes, "CPU" if settings.devices.device == "cpu" else "GPU")


def reserve(request: DeviceRequest, timeout_s: float, signals: Sequence[int]) -> Any:
    """A placement group with the devices of a job and nothing else, so that other actors find theirs.

    Args:
      timeout_s: bound on the wait for the devices.
      signals: received by this process; the first one ends the wait.

    Raises:
      ResourceError: they are not free in time.
    """
    group = importlib.import_module("ray.util").placement_group(
        [{request.resource: request.ranks}] * request.nodes, strategy="STRICT_SPREAD"
    )
    begin = time.monotonic()
    noted = False
    while not group.wait(LINES_S) and not signals:
        waited_s = time.monotonic() - begin
        if waited_s >= timeout_s:
            raise ResourceError(f"waited {timeout_s / 60:g} minutes (--timeout) for {request}: {_shortage(request)}")
        if waited_s > NOTE_S and not noted:
            noted = True
            print(
                f"waiting {timeout_s / 60:g} minutes (--timeout) for {request}: {_shortage(request)}", file=sys.stderr
            )
    return group


def _shortage(request: DeviceRequest) -> str:
    """Devices that the cluster has, and how many are free."""
    other = "; --device=cpu in the command asks for CPUs" if request.resource == "GPU" else ""
    return f"{devices_of_cluster(request.resource)}{other}"


def start_nodes(request: DeviceRequest, group: Any, shutdown_s: int, words: Sequence[str]) -> dict[str, Any]:
    """Start torchrun's agents; actors by the name of their node.

    Args:
      group: of `reserve`.
      shutdown_s: seconds from SIGTERM to SIGKILL of the ranks.
      words: the command and its flags.
    """
    ray = importlib.import_module("ray")
    strategies = importlib.import_module("ray.util.scheduling_strategies")

    amount = {"num_gpus": request.ranks} if request.resource == "GPU" else {"num_cpus": request.ranks}
    actors = [
        ray.remote(NodeActor)
        .options(
            **{"num_cpus": 0} | amount, scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(group, index)
        )
        .remote(os.getcwd(), os.environ.get("OMP_NUM_THREADS"))
        for index in range(request.nodes)
    ]
    places = ray.get([actor.describe.remote() for actor in actors])
    hosts = [host for host, _, _ in places]
    addresses = [address for _, address, _ in places]
    launcher = [f"--nnodes={request.nodes}", f"--nproc-per-node={request.ranks}"]
    launcher += [f"--master-addr={addresses[0]}", f"--master-port={places[0][2]}", f"--shutdown-timeout={shutdown_s}"]
    ray.get(
        [
            actor.start.remote([*launcher, f"--node-rank={index}", "-m", "funrl", *words])
            for index, actor in enumerate(actors)
        ]
    )
    return dict(zip(hosts if len({*hosts}) == len(hosts) else addresses, actors, strict=True))


def _run(nodes: dict[str, Any], signals: Sequence[int]) -> int:
    """Relay lines and signals until every agent has ended; return the worst exit status.

    The first failure leaves the other nodes time to save, then they get SIGTERM. A lost node counts as status 1.
    """
    ray = importlib.import_module("ray")

    running = {actor.poll.remote(): name for name, actor in nodes.items()}
    statuses: dict[str, int] = {}
    forwarded = 0
    deadline = float("inf")
    while running:
        ready, _ = ray.wait([*running], timeout=LINES_S)
        for number in signals[forwarded:]:
            for name in running.values():
                nodes[name].signal.remote(number)
            forwarded += 1
        for reference in ready:
            name = running.pop(reference)
            status = _relay(reference, f"[{name}] " if len(nodes) > 1 else "", name)
            if status is None:
                running[nodes[name].poll.remote()] = name
            else:
                statuses[name] = status
                deadline = min(deadline, time.monotonic() + FAILURE_S) if status else deadline
        if time.monotonic() > deadline:
            deadline = float("inf")
            for name in running.values():
                nodes[name].signal.remote(signal.SIGTERM)
    worst = max(statuses.values())
    # torchrun's own status does not say which signal has ended its ranks.
    return 128 + signals[0] if worst and signals else worst


def _relay(reference: Any, prefix: str, name: str) -> int | None:
    """Print the lines of a node; return its exit status, None while it runs, 1 if it is lost."""
    ray = importlib.import_module("ray")

    try:
        lines, status = ray.get(reference)
    except ray.exceptions.RayError as error:
        cause = str(error).strip().partition("\n")[0]
        print(f"error: node {name} was lost: {cause}", file=sys.stderr, flush=True)
        return 1
    for is_error, text in lines:
        print(prefix + text, file=sys.stderr if is_error else sys.stdout, flush=True)
    return status
