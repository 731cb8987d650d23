"""The named algorithms: golden numbers, the fields they need, and the properties of a whole step.

Golden numbers are written anew, after a change that is meant to move them, by

    python tests/algos/test_named.py
"""

import importlib
import json
import math
import pathlib

import pieces
import pytest
import torch
from funrl.algos.distillation import distillation
from funrl.algos.dppo import dppo
from funrl.algos.grpo import grpo
from funrl.algos.otb import otb
from funrl.algos.ppo import ppo
from funrl.algos.reinforce_plus_plus import reinforce_plus_plus_baseline
from funrl.algos.rloo import rloo
from funrl.algos.shaping import adaptive_kl, fixed_kl
from pieces import NAMED, example, packed, plain, poisoned, policy_logp

from funrl.algos.compose import corrected
from funrl.algos.core import Algorithm, Signal, needs_of
from funrl.algos.corrections import importance_weights
from funrl.batch import Batch, select

GOLDEN = pathlib.Path(__file__).with_name("golden.json")
MADE = {"advantage", "returns", "weight", "label"}

VARIANTS = {
    "ppo with everything": lambda: ppo(0.1, 0.3, 3.0, 0.2, 0.99, 0.9, adaptive_kl(0.1, 0.05), 0.01, 0.02),
    "rloo with KL": lambda: rloo(kl_reward=fixed_kl(0.1)),
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "dppo by KL": lambda: dppo("kl", 0.02, 0.03),
    "otb over turns": lambda: otb(turns=True, raw_tail=True, kl_reward=fixed_kl(0.1)),
    "distillation direct": lambda: distillation(direct=True, kind="k3+"),
    "grpo, truncated importance weights": lambda: corrected(grpo(), importance_weights("token", high=1.1)),
}


def compose(name) -> Algorithm:
    return VARIANTS[name]() if name in VARIANTS else getattr(importlib.import_module(f"funrl.algos.{name}"), name)()


ALL = [*NAMED, *VARIANTS]
each = pytest.mark.parametrize("name", ALL)


def fixed(algorithm, dtype=torch.float64) -> Batch:
    """The example batch with scores of 0 to 1 and nothing that the algorithm makes by itself."""
    batch = example(dtype)
    batch = batch._replace(score=batch.score.sigmoid(), **dict.fromkeys(MADE))
    held = needs_of(algorithm) | {"tokens", "mask", "entropy", "length"}
    return Batch(**{k: v if k in held else None for k, v in batch._asdict().items()})


def prepared(algorithm, batch) -> Batch:
    """The batch as it is trained on: advantages computed, rows drawn."""
    signal = Signal(batch.score, batch.mask)  # type: ignore[arg-type]
    if "score" not in needs_of(algorithm):
        signal = signal._replace(x=torch.zeros(batch.mask.shape[0], dtype=torch.float64))
    signal, _ = algorithm.advantage.update(signal, algorithm.advantage.init(), batch)
    batch = batch._replace(
        advantage=signal.x, mask=signal.mask, returns=signal.returns, weight=signal.weight, **signal.extra
    )
    return batch if signal.rows is None else select(batch, signal.rows)


def losses(algorithm):
    named = {"policy": algorithm.policy_loss, "value": algorithm.value_loss, "reward": algorithm.reward_loss}
    return {k: v for k, v in named.items() if v is not None}


def numbers(name) -> dict:
    """What the golden file holds of an algorithm."""
    algorithm = compose(name)
    batch = prepared(algorithm, fixed(algorithm))
    assert batch.advantage is not None
    out = {"advantage": batch.advantage.sum(1).tolist(), "advantage_norm": batch.advantage.norm().item()}
    moved = policy_logp(example())[: len(batch.mask)]
    for part, loss in losses(algorithm).items():
        leaf = moved.clone().requires_grad_()
        fractions, metrics = loss(leaf, batch)
        value = sum(f.value for f in fractions)
        (gradient,) = torch.autograd.grad(value, leaf)
        out[part] = {"loss": value.item(), "gradient_norm": gradient.norm().item()}
        out[part] |= {k: m.value.item() for k, m in metrics.items()}
    if algorithm.keep is not None:
        out["keep"] = algorithm.keep(fixed(algorithm)).tolist()
    return out


def flat(tree, prefix=""):
    if isinstance(tree, dict):
        return {k: v for key, sub in tree.items() for k, v in flat(sub, f"{prefix}/{key}").items()}
    if isinstance(tree, list):
        return {k: v for n, sub in enumerate(tree) for k, v in flat(sub, f"{prefix}/{n}").items()}
    return {prefix: tree}


@each
def test_golden_numbers(name):
    want, got = flat(json.loads(GOLDEN.read_text())[name]), flat(numbers(name))
    assert set(got) == set(want)
    for key, value in got.items():
        assert math.isclose(value, want[key], rel_tol=1e-9, abs_tol=1e-12), key


def test_golden_file_has_no_strangers():
    assert set(json.loads(GOLDEN.read_text())) == set(ALL)


@each
def test_every_missing_field_is_named(name):
    """`needs_of` lists a field exactly if the algorithm fails without it."""
    algorithm = compose(name)
    needed = needs_of(algorithm)
    full = fixed(algorithm)
    assert needed <= {k for k, v in full._asdict().items() if v is not None}
    for field in needed:
        assert getattr(full, field) is not None
        bare = full._replace(**{field: None})
        with pytest.raises((AssertionError, AttributeError, TypeError, ValueError)):
            batch = prepared(algorithm, bare)
            for loss in losses(algorithm).values():
                loss(policy_logp(example()), batch)
            if algorithm.keep is not None:
                algorithm.keep(bare)


def test_what_the_advantage_does_not_make_is_reported():
    """A critic's loss after a chain that sets no returns, told before the run."""
    wrong = Algorithm(grpo().advantage, grpo().policy_loss, ppo().value_loss)
    assert needs_of(wrong) >= {"returns", "value"}
    assert "returns" not in needs_of(ppo())


@each
def test_a_step_is_exact_under_micro_batches_packing_poison_and_compilation(name):
    algorithm = compose(name)
    batch = prepared(algorithm, fixed(algorithm))
    for loss in losses(algorithm).values():

        def value_and_gradient(batch, logp, parts, loss=loss):
            leaf = logp.clone().requires_grad_()
            outs = [loss(leaf[p], select(batch, p))[0] for p in parts]
            totals = [sum(column[1:], column[0]) for column in zip(*outs, strict=True)]
            value = sum(f.value for f in totals)
            return value.detach(), torch.autograd.grad(value, leaf)[0]

        logp = policy_logp(example())
        value, gradient = value_and_gradient(batch, logp, [slice(None)])
        assert gradient.abs().max() > 0
        assert (gradient[~batch.mask] == 0).all()
        for parts in ([slice(0, 3), slice(3, 7)], [slice(0, None, 2), slice(1, None, 2)]):
            torch.testing.assert_close(
                value_and_gradient(batch, logp, parts), (value, gradient), rtol=1e-12, atol=1e-12
            )
        dirty = value_and_gradient(poisoned(batch), torch.where(batch.mask, logp, torch.nan), [slice(None)])
        assert torch.equal(dirty[0], value) and torch.equal(dirty[1], gradient)
        if "score" not in needs_of(loss) and name != "pf_ppo":  # its rows are drawn: other lengths
            short, short_logp = packed(batch, logp)
            again, _ = value_and_gradient(short, short_logp, [slice(None)])
            torch.testing.assert_close(again, value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["ppo with everything", "grpo", "gspo", "dppo", "vapo", "prime"])
def test_the_policy_loss_compiles_whole(name):
    algorithm = compose(name)
    batch = prepared(algorithm, fixed(algorithm))
    torch._dynamo.reset()

    def step(logp):
        return sum(f.value for f in algorithm.policy_loss(logp, batch)[0])

    results = []
    for fn in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaf = policy_logp(example()).requires_grad_()
        value = fn(leaf)
        results.append((value.detach(), torch.autograd.grad(value, leaf)[0]))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@each
def test_float32_is_close_and_needs_no_other_dtype(name):
    algorithm = compose(name)
    advantages = []
    for dtype in (torch.float64, torch.float32):
        batch = fixed(algorithm, dtype)
        if batch.score is None:
            batch = batch._replace(score=torch.zeros(len(batch.mask), dtype=dtype))
        batch = prepared(algorithm, batch)
        assert batch.advantage is not None
        assert batch.advantage.dtype == dtype
        advantages.append(batch.advantage.double())
    torch.testing.assert_close(*advantages, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "gpg", "sppo", "gdpo", "dapo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_and_lonely_rows_give_exactly_zero(name, dtype):
    """Seven times 0.1 in float32 is where a mean's rounding, divided by a small deviation, becomes an advantage."""
    algorithm = compose(name)
    for score, group in ((torch.full((7,), 0.1), torch.zeros(7)), (torch.linspace(0.1, 3, 7), torch.arange(7))):
        batch = example(dtype)._replace(score=score.to(dtype), group=group.long())
        batch = prepared(algorithm, batch._replace(scores=score.to(dtype)[:, None].repeat(1, 3)))
        assert batch.advantage is not None
        assert (batch.advantage == 0).all()


ZERO_BY_GROUP = {
    *("grpo", "dr_grpo", "dapo", "gspo", "sapo", "cispo", "gmpo", "rloo", "opo", "gpg", "gdpo", "sppo", "dppo", "otb"),
    *("dppo by KL", "grpo, truncated importance weights"),
}
NOT_ZERO = {  # and why a group of equal rewards has advantages
    **dict.fromkeys(("ppo", "pf_ppo", "vapo", "ppo with everything"), "a critic judges, not the group"),
    "remax": "a greedy completion judges, not the group",
    "reinforce_plus_plus": "the batch judges, not the group",
    "reinforce_plus_plus_baseline": "whitens over tokens of completions of different lengths",
    "prime": "process rewards differ, and it whitens as the one before",
    **dict.fromkeys(("rloo with KL", "otb over turns"), "a KL in the rewards makes them unequal"),
    **dict.fromkeys(("distillation", "distillation direct"), "a teacher judges every token"),
}


@each
def test_an_equal_group_and_a_lonely_row_among_others_get_exactly_zero(name):
    """Rows 0, 2 and 4 are an unequal group, 1 and 5 an equal one, 3 and 6 are alone."""
    assert (name in ZERO_BY_GROUP) != (name in NOT_ZERO), "say which of the two"
    algorithm = compose(name)
    score = torch.tensor([0.1, 0.7, 0.9, 0.4, 0.3, 0.7, 0.2], dtype=torch.float64)
    scores = torch.stack((score, score.flip(0), score), 1)
    scores[5] = scores[1]
    batch = prepared(algorithm, fixed(algorithm)._replace(score=score, scores=scores))
    assert batch.advantage is not None
    unequal, rest = batch.advantage[[0, 2, 4]], batch.advantage[[1, 5, 3, 6]]
    assert unequal.abs().max() > 0.01
    assert (rest == 0).all() == (name in ZERO_BY_GROUP)


def test_a_real_difference_is_not_lost_in_the_guard_against_rounding():
    algorithm = grpo()
    score = torch.tensor([0.1, 0.1, 0.1 + 1e-3, 0.1, 0.1, 0.1, 0.1])
    batch = example(torch.float32)._replace(score=score, group=torch.zeros(7, dtype=torch.int64))
    batch = prepared(algorithm, batch)
    assert batch.advantage is not None
    b = plain(batch)
    #  deviation of one among n that is off by d is d / sqrt(n), its distance to the mean d (n - 1) / n: 6 / sqrt(7)
    assert math.isclose(b.advantage[2][2], 6 / math.sqrt(7), rel_tol=5e-3)
    assert math.isclose(b.advantage[0][2], -1 / math.sqrt(7), rel_tol=5e-3)


def test_the_state_of_an_adaptive_coefficient_moves_and_is_a_tree_of_tensors():
    algorithm = ppo(kl_reward=adaptive_kl(0.1, target=1e-6, horizon=70))
    state = algorithm.advantage.init()
    batch = fixed(algorithm)._replace(ref_logp=example().old_logp - 1.0)
    assert batch.score is not None
    _, after = algorithm.advantage.update(Signal(batch.score, batch.mask), state, batch)
    before, now = pieces.sum_leaves(state), pieces.sum_leaves(after)
    assert math.isclose(before, 0.1)
    assert math.isclose(now, 0.1 * (1 + 0.2 * 7 / 70))


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: numbers(name) for name in ALL}, indent=1) + "\n")
    print(f"wrote {GOLDEN}")
