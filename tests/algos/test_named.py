"""The named algorithms: golden numbers, the fields they need, and the properties of a whole step.

Golden numbers are written anew, after a change that is meant to move them, by

    python tests/algos/test_named.py
"""

import dataclasses
import json
import math
import pathlib

import pieces
import pytest
import torch
from pieces import example, fractions, plain, policy_logp

from funrl import algos
from funrl.algos import NAMES, Algorithm, Signal, adaptive_kl, apply_advantage, corrected, reads, reduce, token_mean
from funrl.batch import Batch, as_dict, select
from funrl.testing.awkward_rows import packed_batch, poisoned

GOLDEN = pathlib.Path(__file__).with_name("golden.json")
MADE = {"advantage", "returns", "weight", "label", "imitated", "selected", "entropy_coefficient"}
MADE |= {"prompt_tokens", "sampled"}
ROLES = {"policy": "policy", "critic": "value", "implicit_reward": "reward"}  # role: its name in the golden file
RENAMED = {"implicit_reward/accuracy": "reward/accuracy"}  # metric: its name there

PUBLISHED = {  # arguments of the published algorithms, or for the example, where the recipe's defaults are others
    "ppo": {"dual_clip": None, "kl_coef": 0.0},
    "grpo": {"dual_clip": None, "kl_coef": 0.04},
    "flash_reinforce": {"max_divergence": 0.06},  # which some rows of the example are within
    **{name: {"kl_coef": 0.0} for name in ("rloo", "remax", "reinforce_plus_plus")},
}


def ppo_with_everything() -> Algorithm:
    """Also a KL in the loss, which the recipe does not have."""
    made = algos.ppo(0.1, 0.3, 3.0, 0.2, 0.99, 0.9, 0.1, 0.05, 0.02)
    policy = algos.with_regularizers(algos.clipped_surrogate(0.1, 0.3, 3.0), 0.01, 0.02)
    return dataclasses.replace(made, losses={**made.losses, "policy": reduce(policy, token_mean())})


def grpo() -> Algorithm:
    return algos.grpo(**PUBLISHED["grpo"])


VARIANTS = {
    "ppo with everything": ppo_with_everything,
    "rloo with KL": lambda: algos.rloo(kl_coef=0.1),
    "reinforce_plus_plus_baseline": algos.reinforce_plus_plus_baseline,
    "dppo by KL": lambda: algos.dppo("kl", 0.02, 0.03),
    "otb over turns": lambda: algos.otb(turns=True, raw_tail=True, kl_coef=0.1),
    "gvpo to the reference": lambda: algos.gvpo(to_reference=True),
    "distillation direct": lambda: algos.distillation(direct=True, kind="k3+"),
    "grpo, truncated importance weights": lambda: corrected(grpo(), algos.importance_weights("token", high=1.1)),
}


def compose(name) -> Algorithm:
    if name in VARIANTS:
        return VARIANTS[name]()
    if name == "pf_ppo":
        return algos.pf_ppo(base=algos.ppo(**PUBLISHED["ppo"]))
    return algos.recipe(name)(**PUBLISHED.get(name, {}))


SAMPLED = {name: made for name in NAMES if (made := algos.recipe(name)()).example == "row"}
WITH_ADVANTAGE = [name for name, made in SAMPLED.items() if made.advantage is not None]
ALL = list(dict.fromkeys([*WITH_ADVANTAGE, *VARIANTS]))
each = pytest.mark.parametrize("name", ALL)


def fixed(algorithm, dtype=torch.float64) -> Batch:
    """The example batch with scores of 0 to 1 and nothing that the algorithm makes by itself."""
    batch = example(dtype)
    batch = batch._replace(score=batch.score.sigmoid(), **dict.fromkeys(MADE))
    held = reads(algorithm).required | {"tokens", "mask", "entropy", "length"}
    return Batch(**{k: v for k, v in as_dict(batch).items() if k in held})


def prepared(algorithm, batch) -> Batch:
    """The batch as it is trained on: advantages computed, rows drawn."""
    if "score" not in batch.names():
        batch = batch._replace(score=torch.zeros(len(batch.mask), dtype=example().score.dtype))
    return apply_advantage(algorithm.advantage, algorithm.advantage.init(), batch)[0]


def numbers(name) -> dict:
    """What the golden file holds of an algorithm."""
    algorithm = compose(name)
    batch = prepared(algorithm, fixed(algorithm))
    out = {"advantage": batch.advantage.sum(1).tolist(), "advantage_norm": batch.advantage.norm().item()}
    moved = policy_logp(example())[: len(batch.mask)]
    for role, loss in algorithm.losses.items():
        leaf = moved.clone().requires_grad_()
        value, metrics = loss(leaf, batch)
        (gradient,) = torch.autograd.grad(value, leaf)
        out[ROLES[role]] = {"loss": value.item(), "gradient_norm": gradient.norm().item()}
        out[ROLES[role]] |= {RENAMED.get(k, k): m.value.item() for k, m in metrics.items()}
    if algorithm.filter is not None:
        out["keep"] = algorithm.filter(fixed(algorithm)).tolist()
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
        assert math.isclose(value, want[key], rel_tol=1e-12, abs_tol=1e-12), key


def test_golden_file_has_no_strangers():
    assert set(json.loads(GOLDEN.read_text())) == set(ALL)


@each
def test_a_step_is_exact_under_micro_batches_packing_and_poison(name):
    algorithm = compose(name)
    batch = prepared(algorithm, fixed(algorithm))
    for loss in algorithm.losses.values():

        def value_and_gradient(batch, logp, parts, loss=loss):
            leaf = logp.clone().requires_grad_()
            outs = [fractions(loss, leaf[p], select(batch, p))[0] for p in parts]
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
        if name != "pf_ppo":  # its rows are drawn: other lengths
            short, short_logp = packed_batch(batch, logp)
            again, _ = value_and_gradient(short, short_logp, [slice(None)])
            torch.testing.assert_close(again, value, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_the_policy_loss_compiles_whole():
    algorithm = compose("prime")
    batch = prepared(algorithm, fixed(algorithm))
    torch._dynamo.reset()

    def step(logp):
        return algorithm.losses["policy"](logp, batch)[0]

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
        if batch.get("score") is None:
            batch = batch._replace(score=torch.zeros(len(batch.mask), dtype=dtype))
        batch = prepared(algorithm, batch)
        assert batch.advantage.dtype == dtype
        advantages.append(batch.advantage.double())
    torch.testing.assert_close(*advantages, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    "name",
    [
        *("grpo", "dr_grpo", "rloo", "opo", "gpg", "sppo", "gdpo"),
        *("dapo", "maxrl", "lite_ppo", "real", "gvpo", "a2po", "maxpo"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_and_lonely_rows_give_exactly_zero(name, dtype):
    """Seven times 0.1 in float32 is where a mean's rounding, divided by a small deviation, becomes an advantage."""
    algorithm = compose(name)
    for score, group in ((torch.full((7,), 0.1), torch.zeros(7)), (torch.linspace(0.1, 3, 7), torch.arange(7))):
        batch = example(dtype)._replace(score=score.to(dtype), group=group.long())
        batch = prepared(algorithm, batch._replace(scores=score.to(dtype)[:, None].repeat(1, 3)))
        assert (batch.advantage == 0).all()


ZERO_BY_GROUP = {
    *("grpo", "dr_grpo", "dapo", "gspo", "sapo", "cispo", "gmpo", "rloo", "opo", "gpg", "gdpo", "sppo", "dppo", "otb"),
    *("dppo by KL", "grpo, truncated importance weights"),
    *("maxrl", "lite_ppo", "fipo", "real", "gvpo", "a2po", "m2po", "rollout_is", "chord"),
    *("gigpo", "mt_grpo", "hierarchical_grpo", "echo", "scalerl", "cfpo", "maxpo"),
}
NOT_ZERO = {  # and why a group of equal rewards has advantages
    **dict.fromkeys(("ppo", "pf_ppo", "vapo", "sao", "ppo with everything"), "a critic scores, not the group"),
    "flowrl": "the partition function is taken off, not the group's mean",
    "compaction": "a critic scores, not the group",
    "remax": "a greedy completion scores, not the group",
    "reinforce_plus_plus": "the batch scores, not the group",
    "reinforce_plus_plus_baseline": "whitens over tokens of completions of different lengths",
    "treepo": "whitens as the one before",
    "prime": "process rewards differ, and it whitens as the one before",
    **dict.fromkeys(("rloo with KL", "otb over turns"), "a KL in the rewards makes them unequal"),
    **dict.fromkeys(("distillation", "distillation direct", "sdpo", "iw_opd", "mopd"), "a teacher scores every token"),
    "rae": "the agent's past scores, not the group",
    **dict.fromkeys(("prpo", "flash_reinforce", "spo"), "the batch scores, not the group"),
    "gvpo to the reference": "log-ratios are compared too",
    "topr": "a constant is taken off, not the group's mean",
    "raft_plus_plus": "the best are imitated, even where all are",
    "ssd": "every completion is imitated",
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
    unequal, rest = batch.advantage[[0, 2, 4]], batch.advantage[[1, 5, 3, 6]]
    assert unequal.abs().max() > 0.01
    assert (rest == 0).all() == (name in ZERO_BY_GROUP)


def test_a_real_difference_is_not_lost_in_the_guard_against_rounding():
    algorithm = grpo()
    score = torch.tensor([0.1, 0.1, 0.1 + 1e-3, 0.1, 0.1, 0.1, 0.1])
    batch = example(torch.float32)._replace(score=score, group=torch.zeros(7, dtype=torch.int64))
    batch = prepared(algorithm, batch)
    b = plain(batch)
    #  deviation of one among n that is off by d is d / sqrt(n), its distance to the mean d (n - 1) / n: 6 / sqrt(7)
    assert math.isclose(b.advantage[2][2], 6 / math.sqrt(7), rel_tol=5e-3)
    assert math.isclose(b.advantage[0][2], -1 / math.sqrt(7), rel_tol=5e-3)


def test_the_state_of_an_adaptive_coefficient_moves_and_is_a_tree_of_tensors():
    chain = algos.token_rewards(adaptive_kl(0.1, kl_target=1e-6, horizon=70))
    state = chain.init()
    batch = example()._replace(ref_logp=example().old_logp - 1.0)
    _, after = chain.update(Signal(batch.score, batch.mask), state, batch)
    before, now = pieces.sum_leaves(state), pieces.sum_leaves(after)
    assert math.isclose(before, 0.1)
    assert math.isclose(now, 0.1 * (1 + 0.2 * 7 / 70))


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: numbers(name) for name in ALL}, indent=1) + "\n")
    print(f"wrote {GOLDEN}")
