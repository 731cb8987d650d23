"""Process groups of CPUs have one worker thread each: two would write one string without a lock."""

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from funrl.mesh import collectives
from funrl.mesh.launch import launch
from funrl.mesh.mesh import parse
from funrl.processes import gloo

pytestmark = pytest.mark.gloo


def _groups(mesh):
    """Of each group of a rank what it was made with; and the threads that work for all of them."""
    groups = {axes: distributed_c10d._resolve_process_group(name) for axes, name in mesh.groups.items()}
    for axes in groups:
        collectives.psum(torch.ones(1), mesh, axes)  # the threads have begun, and have their names
    made = {axes: group._get_backend(torch.device("cpu")).options for axes, group in groups.items()}
    threads = [(thread / "comm").read_text().strip() for thread in Path("/proc/self/task").iterdir()]
    return (
        {axes: (options._threads, options.group_name) for axes, options in made.items()},
        {axes: (dist.get_process_group_ranks(group), group.group_name) for axes, group in groups.items()},
        {options._timeout for options in made.values()} == {mesh.timeout},
        threads.count("pt_gloo_runloop"),
    )


@pytest.mark.parametrize("interface", [None, "lo"])
def test_each_group_has_one_worker(interface, monkeypatch):
    if interface is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    made, groups, same_timeout, workers = launch(_groups, parse("dp2,tp2"), "cpu")
    assert made == {axes: (1, name) for axes, (_, name) in groups.items()}
    assert [ranks for ranks, _ in groups.values()] == [[0, 2], [0, 1], [0, 1, 2, 3]]
    assert same_timeout
    assert workers == 3


def _overlapping(rounds, mesh):
    """Sums of what arrives by gathers, scatters and shifts that are on their way together."""
    results = []
    for _ in range(rounds):
        own = torch.full((4,), float(mesh.rank + 1))
        gathers = collectives.start_all_gathers([own] * 3, mesh, "data")
        scatters = collectives.start_psum_scatters([own] * 3, mesh, "data")
        shift = collectives.start_shift(own, mesh, "data")
        results.append([float(collectives.wait(x).sum()) for x in (shift, *reversed(gathers), *scatters)])
    return results


def test_collectives_on_their_way_together_may_be_waited_for_in_any_order():
    assert launch(functools.partial(_overlapping, 3), parse("dp2"), "cpu") == [[8.0] + [12.0] * 3 + [6.0] * 3] * 3


def test_an_interface_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(RuntimeError, match="nowhere0"):
        gloo._devices()
