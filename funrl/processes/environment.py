"""Ranks that another launcher has started: torchrun's variables, or Slurm's, and the attempt that ranks belong to.

Each agent of torchrun counts its own restarts, and none that another one has caused, so that TORCHELASTIC_RESTART_COUNT
differs between ranks of one attempt. The store of the agents survives all attempts. So the first rank names an attempt
in it, and every other rank joins the attempt whose first rank answers it: that of an earlier attempt has ended and does
not. It imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from collections.abc import Mapping, MutableMapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any


class LauncherError(ValueError):
    """Variables of a launcher that say nothing usable; the message says which and what would be right."""


FIRST_PORT = 15000  # of the rendezvous of a Slurm job, whose number chooses one
PORTS = 20000


def read_environment(environment: MutableMapping[str, str] = os.environ) -> int | None:
    """This process's rank, if a launcher has started several; None: it is alone.

    Under srun the variables of torchrun are set from Slurm's.

    Raises:
      LauncherError: a variable is missing, or is not a number that it can be.
    """
    if "SLURM_STEP_NUM_TASKS" in environment and not {"RANK", "WORLD_SIZE"} & environment.keys():
        _take_from_slurm(environment)
    if not {"RANK", "WORLD_SIZE"} & environment.keys():
        return None
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in environment:
            raise LauncherError(
                f"{other}={environment[other]} is in the environment and {name} is not; start the program with "
                f"torchrun or srun, which set both, or unset {other}"
            )
    world = _number(environment, "WORLD_SIZE", 1, None)
    return _number(environment, "RANK", 0, world)


def ranks_of_node(environment: Mapping[str, str] = os.environ) -> int | None:
    """Ranks of each node, where a launcher has started as many on each of several nodes; None: it has not.

    Args:
      environment: with the variables of torchrun, as `read_environment` leaves it.
    """
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    counts = {name: int(environment[name]) for name in names if environment.get(name, "").isdigit()}
    world = counts.get("WORLD_SIZE", 1)
    local = counts.get("LOCAL_WORLD_SIZE", 0)
    if not 0 < local < world or world % local or counts.get("GROUP_WORLD_SIZE", world // local) != world // local:
        return None
    return local


def _number(environment: MutableMapping[str, str], name: str, low: int, high: int | None) -> int:
    text = environment[name]
    if not re.fullmatch(r"\d{1,9}", text) or int(text) < low or (high is not None and int(text) >= high):
        most = "" if high is None else f" and below WORLD_SIZE={high}"
        raise LauncherError(f"{name}={text!r} in the environment: a whole number of at least {low}{most} is needed")
    return int(text)


def _take_from_slurm(environment: MutableMapping[str, str]) -> None:
    """Set the variables of torchrun for a task of a Slurm step of several."""
    if environment["SLURM_STEP_NUM_TASKS"] == "1":
        return
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "localhost"
    tasks = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    job = int(re.sub(r"\D", "", environment.get("SLURM_JOB_ID", "")) or 0)
    environment.update(
        {
            "RANK": environment.get("SLURM_PROCID", ""),
            "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
            "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
            "LOCAL_WORLD_SIZE": tasks[0] if tasks else environment["SLURM_STEP_NUM_TASKS"],
            "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(nodes),
            "MASTER_PORT": environment.get("MASTER_PORT") or str(FIRST_PORT + job % PORTS),
        }
    )


def first_host(nodes: str) -> str:
    """The first host of a list as Slurm writes it: "node[01-04,07],x3" begins with node01."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes)
    return nodes if match is None else "".join(part or "" for part in match.groups())


SHUTDOWN_S = 30  # torchrun's default
SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
OFFER = "funrl/attempt"
ATTEMPT_LOOK_S = 0.02  # between two looks at the store
NAMED_RANKS = 8  # ranks in a message


def shutdown_s(environment: Mapping[str, str] = os.environ, arguments: Sequence[str] | None = None) -> int | None:
    """Seconds from the SIGTERM that torchrun's agent sends its ranks to their SIGKILL; None: it has not started this.

    Args:
      environment: of this process.
      arguments: command line of the agent; None: that of this process's parent, where the system shows it.

    Example:
      >>> shutdown_s({"TORCHELASTIC_RUN_ID": "none"}, ["torchrun", "--shutdown-timeout=600", "train.py"])
      600
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    words = arguments or []
    if arguments is None:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            words = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    for word, following in zip(words, [*words[1:], ""], strict=True):
        match = re.fullmatch(r"--shutdown[-_]timeout(?:=(\d+))?", word)
        value = match and (match[1] or following)
        if value and value.isdigit():
            return int(value)
    given = environment.get(SHUTDOWN_VARIABLE, "")
    return int(given) if given.isdigit() else SHUTDOWN_S


def shutdown_remark(seconds: int | None) -> str | None:
    """A remark on this time for the log of a run; None where torchrun has not started it."""
    if seconds is None:
        return None
    return (
        f"torchrun kills ranks {seconds} s after SIGTERM: a run that is terminated saves its step if step and "
        "save take less; --shutdown-timeout=SECONDS of torchrun gives it more"
    )


def has_agents(environment: Mapping[str, str] = os.environ) -> bool:
    """True if several agents of torchrun, which keep the store, have started the ranks."""
    shared = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return shared and int(environment.get("GROUP_WORLD_SIZE", "1")) > 1


def new_attempt() -> str:
    """Name of an attempt, or of a process that joins one."""
    return uuid.uuid4().hex


def lead_attempt(client: Any, attempt: str, world: int, timeout: timedelta) -> None:
    """Name an attempt, and wait until all other ranks have joined it; called by the first rank.

    Args:
      client: of the store.
      attempt: its name.
      world: number of ranks.
      timeout: bound on the wait.

    Raises:
      TimeoutError: ranks have not come.
    """
    client.set(OFFER, attempt)
    missing = list(range(1, world))
    end = time.monotonic() + timeout.total_seconds()
    while missing:
        arrived = [rank for rank in missing if client.check([_key(attempt, rank)])]
        for rank in arrived:
            client.set(f"{_key(attempt, rank)}/joined", client.get(_key(attempt, rank)))
        missing = [rank for rank in missing if rank not in arrived]
        if missing and time.monotonic() > end:
            names = ", ".join(map(str, missing[:NAMED_RANKS])) + ", ..." * (len(missing) > NAMED_RANKS)
            raise TimeoutError(
                f"waited {timeout.total_seconds():.0f} s for ranks {names} of {world} to start: an agent of torchrun "
                "has not started them, or they have failed; a longer --timeout, in minutes, waits longer"
            )
        if not arrived:
            time.sleep(ATTEMPT_LOOK_S)


def join_attempt(client: Any, rank: int, timeout: timedelta) -> str:
    """Join the attempt that the first rank leads now; returns its name.

    Args:
      client: of the store.
      rank: of this process, not the first.
      timeout: bound on the wait.

    Raises:
      TimeoutError: the first rank has not answered.
    """
    own = new_attempt()
    end = time.monotonic() + timeout.total_seconds()
    asked = ""
    while time.monotonic() < end:
        attempt = client.get(OFFER).decode() if client.check([OFFER]) else ""
        if attempt and attempt != asked:
            client.set(_key(attempt, rank), own)
            asked = attempt
        answer = f"{_key(asked, rank)}/joined"
        if asked and client.check([answer]) and client.get(answer).decode() == own:
            return asked
        time.sleep(ATTEMPT_LOOK_S)
    raise TimeoutError(
        f"waited {timeout.total_seconds():.0f} s for rank 0 to start: an agent of torchrun has not started it, or it "
        "has failed; a longer --timeout, in minutes, waits longer"
    )


def _key(attempt: str, rank: int) -> str:
    return f"{OFFER}/{attempt}/{rank}"
