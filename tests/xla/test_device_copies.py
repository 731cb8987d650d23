"""Copies of the host's tensors on devices, and programs that take over their memory."""

import pytest

pytest.importorskip("jax")
import torch
from jax.sharding import PartitionSpec

from funrl.mesh.mesh import AXES
from funrl.xla.meshes import DeviceCopies, MeshProgram, ShardedFunction, devices_of_mesh

pytestmark = pytest.mark.xla

WHOLE = PartitionSpec()


def test_a_program_takes_over_the_memory_of_donated_copies_alone():
    copies = DeviceCopies(devices_of_mesh(dict.fromkeys(AXES, 1)))
    program = MeshProgram(ShardedFunction("sum", lambda mesh: lambda x, y: x + y, donated=(0,)), copies)
    x, y = torch.ones(4), torch.full((4,), 2.0)
    mine, other = copies.sent(x, WHOLE), copies.sent(y, WHOLE)
    once = program(x, y)
    assert mine.is_deleted() and not other.is_deleted()
    assert copies.sent(y, WHOLE) is other
    twice = program(x, y)  # the host's numbers are sent again
    for result in (once, twice):
        assert result.tolist() == [3.0] * 4
    assert x.tolist() == [1.0] * 4
    assert "input_output_alias" in next(iter(program.compiled.values())).run.as_text()


def test_a_state_that_holds_a_tensor_twice_is_sent_twice():
    copies = DeviceCopies(devices_of_mesh(dict.fromkeys(AXES, 1)))
    function = ShardedFunction("sums", lambda _: lambda xs: tuple(x.add_(1) for x in xs), donated=(0,))
    program = MeshProgram(function, copies)
    x = torch.zeros(2)
    assert [result.tolist() for result in program((x, x))] == [[1.0, 1.0]] * 2
