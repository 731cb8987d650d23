"""Directories that ranks read together: each byte is read by one of them, and every rank has the shards it wants."""

import functools
import math

import pytest
import torch
from own_parts import own_part

from funrl import trees
from funrl.mesh.collectives import gather_objects
from funrl.mesh.launch import launch
from funrl.mesh.mesh import AXES, Mesh, parse
from funrl.mesh.reading import contiguous_layout
from funrl.mesh.rules import STORED, Layout, fully_sharded, layouts
from funrl.models import decoder_config, decoder_model
from funrl.models.decoder.routing import Experts
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface import weight_slices

DENSE = decoder_config(vocab=32, embed=10, layers=2, heads=4, kv_heads=2, head=4, mlp=12, family="qwen3", qk_norm=True)
MIXED = decoder_config(
    vocab=32,
    embed=10,
    layers=2,
    heads=4,
    kv_heads=2,
    head=4,
    mlp=12,
    family="qwen3_moe",
    qk_norm=True,
    experts=Experts(count=2, per_token=1, mlp=6),
)


class CountedFile:
    """A file of weights that notes the bytes of what is read of it, which has to be contiguous."""

    opened, counts = weight_slices.safe_open, list[int]()

    def __init__(self, *args, **kwargs):
        self.file = self.opened(*args, **kwargs)

    def get_slice(self, name):
        return CountedSlice(self.file.get_slice(name))


class CountedSlice:
    def __init__(self, held):
        self.held, self.get_shape = held, held.get_shape

    def __getitem__(self, index):
        parts = [x.indices(n)[:2] for x, n in zip(index, self.get_shape(), strict=True)]
        first = next((dim for dim, (low, high) in enumerate(parts) if high - low > 1), len(parts))
        assert all(part == (0, n) for part, n in zip(parts[first + 1 :], self.get_shape()[first + 1 :], strict=True))
        CountedFile.counts.append(self.held[index].nbytes)
        return self.held[index]


def _read(folder, model, table, mesh):
    """The bytes that all ranks have read, and whether this rank has what it would read alone."""
    placed = layouts(model.shapes, model.axes, table, mesh.sizes)
    alone = own_part(folder, model, torch.float64, placed, mesh.rank)
    weight_slices.safe_open = CountedFile
    _, result = hf.load(folder, torch.float64, mesh, layouts=placed, model=model)
    same = all(torch.equal(x, y) for x, y in zip(trees.leaves(result), trees.leaves(alone), strict=True))
    return gather_objects((sum(CountedFile.counts), same), mesh)


@pytest.mark.gloo
@pytest.mark.parametrize(
    "text, config, table",
    [
        ("dp4", DENSE, STORED),
        ("tp2", DENSE, STORED),
        ("dp3", DENSE, fully_sharded(STORED)),
        ("dp2,ep2", MIXED, fully_sharded(STORED, ("data", "expert"))),
    ],
)
def test_ranks_of_a_node_read_each_byte_once(text, config, table, tmp_path):
    model = decoder_model(config)
    params = model.init(torch.Generator().manual_seed(0))
    hf.save(tmp_path, model, params)
    result = launch(functools.partial(_read, tmp_path, model, table), parse(text), "cpu")
    assert sum(count for count, _ in result) == trees.nbytes(params)
    assert all(count for count, _ in result) and all(same for _, same in result)


@pytest.mark.parametrize(
    "shape, axes", [((3,), ()), ((2, 7, 5), ("data",)), ((4, 3, 2), ("tensor", "data")), ((1, 9), ())]
)
def test_a_tensor_is_read_in_contiguous_parts(shape, axes):
    sizes = parse("dp2,ep2,tp2")
    wanted = Layout(shape, ((), *((axes,) if len(shape) > 1 else ()), *((),) * (len(shape) - 2)), tuple(sizes.values()))
    layout, x = contiguous_layout(wanted), torch.arange(math.prod(shape)).view(shape)
    parts = [x[tuple(slice(*ends) for ends in layout.box(rank))].flatten() for rank in range(Mesh(sizes).world)]
    assert all(torch.equal(part, torch.arange(part[0], part[0] + len(part))) for part in parts if len(part))
    assert sorted(torch.cat(parts).tolist()) == x.flatten().tolist()
    assert set(layout.axes) <= set(AXES)
