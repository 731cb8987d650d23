"""What optax does not say: the fused path, low precision, masks, errors, learning."""

import math

import pytest
import torch

from funrl import optim, trees
from funrl.mesh.rules import Layout
from funrl.optim import fused


def params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    w = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    return {"attn": {"q": w(2, 3, 4), "q_bias": w(2, 3)}, "norm": w(4)}


def test_fused_adamw_is_adamw_in_place(monkeypatch):
    monkeypatch.setattr(fused, "GROUP", 10)  # several groups
    args = {"learning_rate": optim.warmup_constant(0.1, 3), "weight_decay": 0.1, "mask": optim.matrices}
    plain, quick = optim.adamw(**args), optim.fused_adamw(**args)
    p, q = params(torch.float64), params(torch.float64)
    s, t = plain.init(p), quick.init(q)
    held = [x.data_ptr() for x in trees.leaves((q, t["adam"].mu, t["adam"].nu))]
    for step in range(10):
        g = trees.map(lambda x, k=step: torch.sin(x * (k + 1)), p)
        h = trees.clone(g)
        own = [x.data_ptr() for x in trees.leaves(h)]
        u, s = plain.update(g, s, p)
        p = optim.apply_updates(p, u)
        v, t = quick.update(h, t, q)
        assert [x.data_ptr() for x in trees.leaves(v)] == own
        q = optim.apply_updates_(q, v)
        for x, y in zip(trees.leaves((p, s)), trees.leaves((q, t)), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-13)
    assert [x.data_ptr() for x in trees.leaves((q, t["adam"].mu, t["adam"].nu))] == held


@pytest.mark.parametrize("make", [optim.adamw, optim.fused_adamw])
def test_a_step_in_place_has_the_bits_of_an_update_that_is_applied(make):
    """With clipping and leaves that do not learn, whether or not the optimizer has a way in place."""
    mask = lambda tree: trees.map_named(lambda name, _: name != "norm", tree)  # noqa: E731
    clip = lambda: optim.clip_by_global_norm(0.5, in_place=True)  # noqa: E731
    optimizer = optim.chain(clip(), optim.masked(make(0.1, weight_decay=0.1), mask))
    assert (optimizer.in_place is None) == (make is optim.adamw)
    p, q = params(), params()
    s, t = optimizer.init(p), optimizer.init(q)
    for step in range(3):
        g = trees.map(lambda x, k=step: torch.sin(x * (k + 1)), p)
        h = trees.clone(g)
        updates, s = optimizer.update(g, s, p, norm=optim.global_norm(g))
        p = optim.apply_updates_(p, updates)
        q, t = optim.step_(optimizer, h, t, q, optim.global_norm(h))
        assert all(map(torch.equal, trees.leaves((p, s)), trees.leaves((q, t))))


@pytest.mark.parametrize("make", [optim.adamw, optim.fused_adamw])
def test_moments_of_bfloat16_parameters_are_float32(make):
    p = params(torch.bfloat16)
    step = make(1e-2, mu_dtype=torch.bfloat16)
    state = step.init(p)
    assert {x.dtype for x in trees.leaves(state["adam"].nu)} == {torch.float32}
    assert {x.dtype for x in trees.leaves(state["adam"].mu)} == {torch.bfloat16}
    assert {x.dtype for x in trees.leaves(make(1e-2).init(p)["adam"].mu)} == {torch.float32}
    for _ in range(3):
        g = trees.map(torch.ones_like, p)
        updates, state = step.update(g, state, p)
    # A gradient of 1 for ever: mu and nu are 1 after correction, the update is -lr; mu itself is rounded to bfloat16.
    for u in trees.leaves(updates):
        assert u.dtype == torch.float32
        torch.testing.assert_close(u, torch.full_like(u, -1e-2), rtol=1e-2, atol=0)
    assert {x.dtype for x in trees.leaves(optim.apply_updates(p, updates))} == {torch.bfloat16}
    assert state["adam"].count.item() == 3
    assert {x.dtype for x in trees.leaves(state["adam"].mu)} == {torch.bfloat16}


def test_the_mask_of_matrices_leaves_out_norms_and_biases():
    assert optim.matrices(params()) == {"attn": {"q": True, "q_bias": False}, "norm": False}
    decay = optim.add_decayed_weights(0.5, optim.matrices)
    p = params()
    updates, _ = decay.update(trees.zeros_like(p), decay.init(p), p)
    torch.testing.assert_close(updates["attn"]["q"], 0.5 * p["attn"]["q"])
    assert not updates["attn"]["q_bias"].any() and not updates["norm"].any()


def test_clipping_scales_to_the_norm_and_passes_what_is_below():
    g = {"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}  # norm 5
    assert optim.global_norm(g).item() == 5
    for limit, factor in ((10.0, 1.0), (5.0, 1.0), (1.0, 0.2)):
        clipped, _ = optim.clip_by_global_norm(limit).update(g, (), g)
        torch.testing.assert_close(clipped, trees.map(lambda x, f=factor: f * x, g))
        given = trees.clone(g)
        same, _ = optim.clip_by_global_norm(limit, in_place=True).update(given, (), given)
        assert all(
            x is y and torch.equal(x, z) for x, y, z in zip(*map(trees.leaves, (same, given, clipped)), strict=True)
        )


def test_the_norm_of_low_precision_is_taken_in_float32_and_of_nothing_is_zero():
    g = {"a": torch.full((1000,), 0.1, dtype=torch.bfloat16), "b": torch.zeros(1)}
    norm = optim.global_norm(g)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(math.sqrt(1000) * g["a"][0].item(), rel=1e-6)
    assert optim.global_norm({}).item() == 0


def test_a_norm_that_the_caller_has_taken_is_not_taken_again():
    """It goes to the first step of a chain; the second has another gradient."""
    taken = []

    def norm_of(tree):
        taken.append(optim.global_norm(tree))
        return taken[-1]

    clip = optim.clip_by_global_norm(1.0, norm_of)
    g = {"a": torch.tensor([3.0, 4.0])}
    step = optim.chain(clip, optim.sgd(0.1))
    given, _ = step.update(g, step.init(g), g, norm=torch.tensor(10.0))
    assert taken == []
    torch.testing.assert_close(given["a"], -0.01 * g["a"])
    step.update(g, step.init(g), g)
    assert taken == [5]
    twice = optim.chain(optim.scale(2), clip)
    clipped, _ = twice.update(g, twice.init(g), g, norm=torch.tensor(5.0))
    assert taken == [5, 10]
    torch.testing.assert_close(clipped["a"], g["a"] / 5)


def test_states_of_steps_of_one_name_are_told_apart():
    step = optim.chain(optim.trace(0.1), optim.trace(0.2), optim.sgd(0.1), optim.trace(0.3))
    assert list(step.init(params())) == ["momentum", "momentum_2", "sgd", "momentum_3"]


def test_a_leaf_of_no_transformation_is_an_error():
    step = optim.partition({"adamw": optim.adamw(0.1)}, lambda p: trees.map_named(lambda name, x: name[-1], p))
    with pytest.raises(ValueError, match=r"attn/q has the label 'q'; there are \['adamw'\]"):
        step.init(params())


def test_a_state_without_a_layout_is_an_error():
    p = params()
    lay = trees.map(lambda x: Layout(tuple(x.shape), ((),) * x.ndim, (1, 1, 1, 1)), p)
    state = {"adam": optim.adamw(0.1).init(p), "rows": (torch.zeros(()), torch.zeros(3))}
    with pytest.raises(ValueError, match=r"rows/1 of the optimizer's state has shape \(3,\)"):
        optim.layouts_of(state, lay)


def test_a_gradient_that_is_not_finite_stays_visible():
    g = {"a": torch.tensor([float("inf"), 1.0])}
    clipped, _ = optim.clip_by_global_norm(1.0).update(g, (), g)
    assert not clipped["a"].isfinite().all()


@pytest.mark.parametrize("warmup,steps", [(5, 5), (-1, 5), (6, 5)])
def test_a_warmup_that_does_not_end_in_time_is_an_error(warmup, steps):
    with pytest.raises(ValueError, match=f"warmup={warmup}, steps={steps}"):
        optim.warmup_cosine(0.1, warmup, steps)
    with pytest.raises(ValueError, match=f"warmup={warmup}, steps={steps}"):
        optim.warmup_linear(0.1, warmup, steps)
    with pytest.raises(ValueError, match="at least 1"):
        optim.cosine(0.1, 0)
