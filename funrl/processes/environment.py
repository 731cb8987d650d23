"""Ranks that another launcher has started: torchrun's variables, or Slurm's. It imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping


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
