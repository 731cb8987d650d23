"""Gloo with one worker thread for each process group.

`ProcessGroupGloo` has two, which take collectives from one queue. When both end one at about the same time, both assign
the name of the last collective to the same string (`lastCompletedWorkName` in `runLoop`) without a lock: its memory is
freed twice, or written after it was freed, and some later `malloc` aborts. All-gathers that overlap meet it, as their
name, `ALLGATHER_COALESCED`, is too long to be kept in the string itself. The order of a group's collectives is the same
on every rank, so one thread finishes all of them too.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

NAME = "gloo_in_order"


def register_gloo() -> str:
    """Name of the backend, which `torch.distributed` knows from now on."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _in_order, extended_api=True, devices=["cpu"])
    return NAME


def _in_order(group: Any, _: Any) -> Any:
    """Gloo's part of a process group; `group` is what torch.distributed tells the factory of a backend."""
    backend: Any = dist.ProcessGroupGloo
    options = backend._Options()
    options._devices = _devices()
    options._threads = 1
    options._timeout = group.timeout
    options.group_name = group.group_id
    options.global_ranks_in_group = group.global_ranks_in_group
    return backend(group.store, group.group_rank, group.group_size, options)


def _devices() -> list[Any]:
    """Gloo's devices: the interfaces that GLOO_SOCKET_IFNAME names, as with torch's own backend, or the default."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not names:
        return [dist.ProcessGroupGloo.create_default_device()]
    return [dist.ProcessGroupGloo.create_device(interface=name) for name in names.split(",")]
