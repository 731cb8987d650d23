"""Programs of functions of trees of tensors, on one device."""

from funrl.mesh.mesh import SINGLE
from funrl.xla.meshes import MeshProgram, ShardedFunction, copies_on


def program_of(function, name="program"):
    return MeshProgram(ShardedFunction(name, lambda mesh: function), copies_on(tuple(SINGLE.sizes.items())))
