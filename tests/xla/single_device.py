"""Programs of functions of trees of tensors, on one device."""

from funrl.mesh.mesh import SINGLE
from funrl.xla.meshes import DeviceCopies, MeshProgram, ShardedFunction, devices_of_mesh


def program_of(function, name="program"):
    return MeshProgram(ShardedFunction(name, lambda mesh: function), DeviceCopies(devices_of_mesh(SINGLE.sizes)))
