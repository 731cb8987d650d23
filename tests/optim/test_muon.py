"""Newton-Schulz against the singular values' polynomial, Muon against torch.optim.Muon, and both on meshes."""

import math

import pytest
import torch
from torch.optim import _muon
from torch.utils.flop_counter import FlopCounterMode

from funrl import optim, trees
from funrl.mesh import mesh as meshes
from funrl.mesh.launch import launch
from funrl.mesh.reshard import unshard
from funrl.mesh.rules import STORED, Leading, fully_sharded, layouts, shard
from funrl.mesh.simulate import gather, scatter, simulate
from funrl.optim import orthogonal

SCALES = {
    "original": lambda r, c: math.sqrt(max(1, r / c)),
    "match_rms_adamw": lambda r, c: 0.2 * math.sqrt(max(r, c)),
    "none": lambda r, c: 1,
}


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def reference(x):
    """U f(S / |S|) V^T, each singular value for itself."""
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    norm = math.sqrt(sum(value**2 for value in s.tolist()))
    values = []
    for value in s.tolist():
        value /= norm
        for _ in range(5):
            value = 3.4445 * value - 4.7750 * value**3 + 2.0315 * value**5
        values.append(value)
    return u @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ v


@pytest.mark.parametrize("shape", [(4, 4), (3, 7), (7, 3), (1, 5), (5, 1)])
def test_newton_schulz_is_a_polynomial_of_the_singular_values(shape):
    x = randn(*shape)
    got = optim.newton_schulz(x)
    torch.testing.assert_close(got, reference(x), rtol=0, atol=1e-12)
    assert torch.linalg.svdvals(got).min() > 0.6 and torch.linalg.svdvals(got).max() < 1.3
    for factor in (1e-3, 1e5):  # the size of the gradient does not count
        torch.testing.assert_close(optim.newton_schulz(factor * x), got, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 70), (2, 5, 40)])
def test_newton_schulz_works_on_the_shorter_side_of_a_matrix(shape):
    counts = []
    for x in (randn(*shape), randn(*shape).mT):
        with FlopCounterMode(display=False) as counter:
            optim.newton_schulz(x)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_newton_schulz_of_a_batch_of_zero_and_of_other_coefficients():
    x = randn(2, 3, 4)
    each = torch.stack([optim.newton_schulz(part) for part in x])
    torch.testing.assert_close(optim.newton_schulz(x), each, rtol=0, atol=1e-14)
    assert not optim.newton_schulz(torch.zeros(3, 4)).any()
    # The cubic iteration 3/2 x - 1/2 x^3 converges to U V^T itself.
    u, _, v = torch.linalg.svd(x[0], full_matrices=False)
    torch.testing.assert_close(optim.newton_schulz(x[0], [(1.5, -0.5, 0.0)] * 40), u @ v, rtol=0, atol=1e-12)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scaling", ["original", "match_rms_adamw"])
def test_steps_are_those_of_torch_in_float64(scaling, nesterov, monkeypatch):
    """torch iterates in bfloat16; here with the reference instead."""
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", lambda update, *args: reference(update))
    ours = {"wide": randn(3, 5), "tall": randn(6, 2, seed=1)}
    theirs = {name: torch.nn.Parameter(x.clone()) for name, x in ours.items()}
    other = torch.optim.Muon(
        theirs.values(), lr=0.1, weight_decay=0.2, momentum=0.8, nesterov=nesterov, adjust_lr_fn=scaling
    )
    step = optim.muon(0.1, 0.8, nesterov, 0.2, scaling)
    state = step.init(ours)
    for seed in range(2, 7):
        grads = {name: randn(*x.shape, seed=seed) for name, x in ours.items()}
        for name, x in theirs.items():
            x.grad = grads[name].clone()
        other.step()
        updates, state = step.update(grads, state, ours)
        ours = optim.apply_updates(ours, updates)
        for name, x in ours.items():
            torch.testing.assert_close(x, theirs[name].detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scaling", SCALES)
def test_bfloat16_iterations_are_near(scaling):
    x = {"w": randn(16, 8, dtype=torch.float32)}
    made, _ = optim.orthogonalize(scaling, ns_dtype=torch.bfloat16).update(x, (), x)
    expected = reference(x["w"].double()) * SCALES[scaling](16, 8)
    assert made["w"].dtype == torch.float32
    assert (made["w"] - expected).norm() < 0.06 * expected.norm()


VIEWS = {
    ("mlp", "embed"): (0, 1),
    ("embed", "mlp"): (0, 1),
    ("heads", "head", "embed"): (0, 2),
    ("embed", "heads", "head"): (0, 1),
    ("experts", "mlp", "expert_embed"): (1, 1),
    ("experts", "expert_embed", "mlp"): (1, 1),
    ("experts", "embed"): (0, 1),  # a router
    ("rank", "embed"): (0, 1),
}


@pytest.mark.parametrize("axes", VIEWS)
def test_views_of_weights(axes):
    assert optim.matrix_view("w", axes) == VIEWS[axes]


def test_tensors_that_are_not_seen_to_be_matrices():
    with pytest.raises(ValueError, match=r"layers/0/w: the axes \('heads', 'rank', 'head'\)"):
        optim.matrix_view("layers/0/w", ("heads", "rank", "head"))
    step, q = optim.orthogonalize(), {"q": randn(2, 3, 4)}
    with pytest.raises(ValueError, match=r"q has shape \(2, 3, 4\)"):
        step.init(q)
    with pytest.raises(ValueError, match=r"scaling is 'muP', there are \['original'"):
        optim.orthogonalize("muP")


def test_tensors_of_more_dims_are_seen_as_matrices():
    axes = {"q": ("heads", "head", "embed"), "o": ("embed", "heads", "head"), "up": ("experts", "mlp", "embed")}
    x = {"q": randn(2, 3, 4), "o": randn(4, 2, 3), "up": randn(3, 5, 4)}
    made, _ = optim.orthogonalize("original", axes=axes).update(x, (), x)
    expected = {
        "q": reference(x["q"].reshape(6, 4)).view(2, 3, 4) * math.sqrt(6 / 4),
        "o": reference(x["o"].reshape(4, 6)).view(4, 2, 3),
        "up": torch.stack([reference(item) for item in x["up"]]) * math.sqrt(5 / 4),
    }
    for name, y in expected.items():
        torch.testing.assert_close(made[name], y, rtol=0, atol=1e-12)


def test_matrices_inside_the_model_are_muons():
    axes = {
        "embed": ("vocab", "embed"),
        "norm": ("norm",),
        "value": ("value", "norm"),
        "q_bias": ("heads", "head"),
        "router": ("experts", "embed"),
        "up": ("experts", "mlp", "expert_embed"),
    }
    params = {name: randn(*[2] * len(own)) for name, own in axes.items()}
    state = optim.muon(0.1, axes=axes).init(params)
    assert [n for n, _ in trees.named(state["muon"])] == ["momentum/trace/router", "momentum/trace/up"]
    assert [n for n, _ in trees.named(state["adamw"]["adam"].mu)] == ["embed", "norm", "q_bias", "value"]


def _uneven(mesh):
    whole = {"up": randn(8, 4), "q": randn(4, 3, 2, seed=1)}
    axes = {"up": ("mlp", "embed"), "q": ("heads", "head", "embed")}
    lay = layouts(whole, axes, fully_sharded(STORED), mesh.sizes)
    local = shard(whole, lay, mesh)
    made, _ = optim.orthogonalize(axes=axes, layouts=lay, mesh=mesh).update(local, (), local)
    assert trees.map(lambda x: x.shape, made) == trees.map(lambda x: x.shape, local)
    return optim.orthogonalize(axes=axes).update(whole, (), whole)[0], unshard(made, lay, mesh)


@pytest.mark.gloo
def test_shards_need_not_be_equal():
    expected, made = launch(_uneven, meshes.parse("dp3"), "cpu")  # of 4: 2, 2 and 0; of 2: 1, 1 and 0
    for name, x in expected.items():
        torch.testing.assert_close(made[name], x, rtol=0, atol=1e-13)


AXES = {
    "q": ("heads", "head", "embed"),
    "layers": tuple({"up": ("mlp", "embed")} for _ in range(6)),
    "up": ("experts", "mlp", "embed"),
}
RULES = {
    "tp": {"heads": "tensor", "mlp": "tensor", "embed": None, "experts": None},
    "fsdp": {"heads": "tensor", "mlp": "tensor", "embed": "data", "experts": None},
    "fsdp of one dim": {"heads": ("tensor", "data"), "mlp": ("data", "tensor"), "embed": None, "experts": None},
    "ep": {"heads": "tensor", "mlp": "tensor", "embed": "data", "experts": "expert"},
    "several dims": {"heads": "tensor", "mlp": "tensor", "embed": Leading("data"), "experts": None},
    "several axes": {"heads": None, "mlp": None, "embed": (Leading("data"), Leading("expert")), "experts": None},
}


@pytest.mark.parametrize(
    ("rules", "mesh"),
    [
        ("tp", "tp2"),
        ("fsdp", "dp2,tp2"),
        ("fsdp of one dim", "dp2,tp2"),
        ("ep", "dp2,ep2,tp2"),
        ("several dims", "dp4,tp2"),
        ("several dims", "dp8"),
        ("several axes", "dp2,ep4"),
    ],
)
def test_on_a_mesh_the_numbers_are_those_of_one_device(mesh, rules, monkeypatch):
    whole = {
        "q": randn(4, 6, 8),
        "layers": tuple({"up": randn(8, 4, seed=n)} for n in range(6)),
        "up": randn(2, 4, 8),
    }
    lay = layouts(whole, AXES, {"head": None, **RULES[rules]}, meshes.parse(mesh))
    expected, _ = optim.orthogonalize(axes=AXES).update(whole, (), whole)
    seen, iterate = [], optim.newton_schulz
    monkeypatch.setattr(orthogonal, "newton_schulz", lambda x, *args: seen.append(tuple(x.shape)) or iterate(x, *args))
    with simulate(mesh) as m:
        local = scatter(whole, lay)
        made, _ = optim.orthogonalize(axes=AXES, layouts=lay, mesh=m).update(local, (), local)
        ranks = [gather(made, rank) for rank in range(m.world)]
    for rank, tree in enumerate(ranks):
        for (name, x), y, its in zip(trees.named(tree), trees.leaves(expected), trees.leaves(lay), strict=True):
            part = y[tuple(slice(low, high) for low, high in its.box(rank))]
            torch.testing.assert_close(x, part, rtol=0, atol=1e-13, msg=lambda t, name=name: f"{name}: {t}")
    assert seen.count((8, 4)) == -(-6 // m.world)  # whole matrices, and all ranks work on the six of them
