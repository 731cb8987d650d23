"""The text of a plan: its numbers by hand."""

import torch

from funrl.mesh.explain import explain, kinds, size
from funrl.mesh.plan import plan
from funrl.mesh.rules import Layout

DP4 = (4, 1, 1, 1)


def test_a_row_for_tensors_of_one_name_and_the_totals():
    src = {f"layers/{i}": Layout((8, 4), (("data",), ()), DP4) for i in range(3)} | {"norm": Layout((4,), ((),), DP4)}
    dst = {name: Layout(layout.shape, ((),) * len(layout.shape), DP4) for name, layout in src.items()}
    made = plan(src, dst, torch.float32)
    axes = {name: ("mlp", "embed")[-len(layout.shape) :] for name, layout in src.items()}
    layers, norm = kinds(made, axes)
    # 8 x 4 x 4 bytes = 128 a tensor; a quarter of it on each of 4 devices, which receive the other three quarters.
    assert (layers.name, layers.count, layers.held, layers.received) == ("layers/*", 3, (3 * 32, 3 * 128), 3 * 4 * 96)
    assert (norm.name, norm.count, norm.held, norm.received) == ("norm", 1, (16, 16), 0)
    lines = explain(made, axes).splitlines()
    row = "layers/* x 3 8x4 mlp/dp4 embed mlp embed 96 B 384 B 1.15 kB gather dp4"
    assert " ".join(lines[2].split()) == row
    assert lines[-3] == "a device holds 112 B in training and 400 B in generation, 16 B of it shared"
    assert lines[-2].startswith("moved 1.15 kB; the least possible is 1.15 kB; gathering everything everywhere")


def test_sizes_have_three_figures():
    assert [size(x) for x in (0, 999, 1000, 1234567, 999_600, 5.789e12)] == [
        "0 B",
        "999 B",
        "1 kB",
        "1.23 MB",
        "1 MB",
        "5.79 TB",
    ]
