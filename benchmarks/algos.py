"""Advantages of 1,024 responses x 8,192 tokens on one core, beside the same formulas with a loop over tokens.

    OMP_NUM_THREADS=1 python benchmarks/algos.py [--rows=1024] [--tokens=8192] [--rounds=5]

The other column is what verl computes, written plainly: backward recursions token by token over the batch, groups as
lists in a dictionary. Both get the same float32 tensors; they take turns, and the medians are shown. CPU-seconds, so
that another program on the machine disturbs little. The two columns must agree to 1e-3 before they are timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from funrl.algos import (
    fixed_kl,
    gae,
    group_center,
    group_scale,
    implicit_rewards,
    importance_weights,
    kl_in_reward,
    leave_one_out,
    length_adaptive,
    optimal_token_baseline,
    reward_to_go,
    to_last_token,
    to_tokens,
    whiten,
)
from funrl.algos.core import Advantage, Signal, chain
from funrl.batch import Batch


def make_batch(rows: int, tokens: int) -> Batch:
    """Groups of eight, prompts of up to an eighth of the tokens, completions of any length, 0 or 1 as a score."""
    draw = torch.Generator().manual_seed(0)
    start = torch.randint(1, tokens // 8, (rows // 8 + 1,), generator=draw).repeat_interleave(8)[:rows, None]
    length = torch.randint(1, tokens - tokens // 8, (rows, 1), generator=draw)
    position = torch.arange(tokens)
    old = -torch.randn(rows, tokens, generator=draw).abs()
    near = {
        name: old + 0.1 * torch.randn(rows, tokens, generator=draw)
        for name in ("ref_logp", "rollout_logp", "implicit_logp")
    }
    return Batch(
        tokens=torch.zeros(rows, tokens, dtype=torch.int64),
        mask=(position >= start) & (position < start + length),
        group=torch.arange(rows) // 8,
        score=torch.randint(0, 2, (rows,), generator=draw).float(),
        greedy_score=torch.randint(0, 2, (rows,), generator=draw).float(),
        scores=torch.rand(rows, 3, generator=draw),
        old_logp=old,
        value=torch.randn(rows, tokens, generator=draw),
        sum_pi_squared=old.exp().square(),
        **near,
    )


def as_lists(group: Tensor) -> dict[int, list[int]]:
    rows = defaultdict(list)
    for i, number in enumerate(group.tolist()):
        rows[number].append(i)
    return rows


def token_rewards(b: Batch) -> Tensor:
    reward = torch.zeros(b.mask.shape)
    for i in range(len(reward)):
        reward[i, int(b.mask[i].nonzero()[-1])] = b.score[i]  # type: ignore[index]
    return reward


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    mean = (x * mask).sum() / mask.sum()
    var = ((x - mean).square() * mask).sum() / (mask.sum() - 1)
    return (x - mean) * torch.rsqrt(var + 1e-8) * mask


def loop_gae(b: Batch) -> Tensor:
    reward, mask = token_rewards(b), b.mask.float()
    columns, value_after, advantage_after = [], torch.zeros(len(reward)), torch.zeros(len(reward))
    for t in reversed(range(reward.shape[1])):
        delta = reward[:, t] + value_after - b.value[:, t]  # type: ignore[index]
        advantage = delta + 0.95 * advantage_after
        on = mask[:, t]
        value_after = b.value[:, t] * on + (1 - on) * value_after  # type: ignore[index]
        advantage_after = advantage * on + (1 - on) * advantage_after
        columns.append(advantage_after)
    return masked_whiten(torch.stack(columns[::-1], dim=1), mask)


def loop_returns(b: Batch) -> Tensor:
    reward, mask = token_rewards(b), b.mask.float()
    columns, after = [], torch.zeros(len(reward))
    for t in reversed(range(reward.shape[1])):
        after = torch.where(b.mask[:, t], reward[:, t] + after, after)
        columns.append(after)
    return torch.stack(columns[::-1], dim=1) * mask


def loop_reinforce(b: Batch) -> Tensor:
    return masked_whiten(loop_returns(b), b.mask.float())


def dictionary_grpo(b: Batch) -> Tensor:
    score = b.score.clone()  # type: ignore[union-attr]
    for rows in as_lists(b.group).values():  # type: ignore[arg-type]
        own = torch.stack([score[i] for i in rows])
        mean, std = own.mean(), own.std()
        for i in rows:
            score[i] = (score[i] - mean) / (std + 1e-6)
    return score[:, None] * b.mask


def dictionary_rloo(b: Batch) -> Tensor:
    score = b.score.clone()  # type: ignore[union-attr]
    for rows in as_lists(b.group).values():  # type: ignore[arg-type]
        own = torch.stack([score[i] for i in rows])
        n = len(rows)
        for i in rows:
            score[i] = score[i] * n / (n - 1) - own.mean() * n / (n - 1)
    return score[:, None] * b.mask


def loop_otb(b: Batch) -> Tensor:
    mask, returns = b.mask.float(), loop_returns(b)
    weight = ((1 - 2 * b.old_logp.exp() + b.sum_pi_squared) * mask).cumsum(1) * mask  # type: ignore[union-attr]
    out = torch.zeros_like(returns)
    for rows in as_lists(b.group).values():  # type: ignore[arg-type]
        base = (returns[rows] * weight[rows]).sum(0) / (weight[rows].sum(0) + 1e-8)
        base = torch.where(mask[rows].sum(0) > 1, base, 0.0)
        out[rows] = (returns[rows] - base) * mask[rows]
    return out


def cases() -> dict[str, tuple[Advantage, Callable[[Batch], Tensor] | None]]:
    rewards = to_last_token()
    baseline = optimal_token_baseline(raw_tail=True)
    return {
        "ppo: gae, whiten": (chain(rewards, gae(1.0, 0.95), whiten()), loop_gae),
        "reinforce++": (chain(rewards, reward_to_go(), whiten()), loop_reinforce),
        "grpo": (chain(group_center(), group_scale(), to_tokens()), dictionary_grpo),
        "rloo": (chain(leave_one_out(), to_tokens()), dictionary_rloo),
        "otb": (chain(rewards, reward_to_go(), baseline), loop_otb),
        "vapo: two lambdas, whiten": (
            chain(rewards, gae(1.0, length_adaptive(), 1.0), whiten()),
            None,
        ),
        "prime: process rewards": (
            chain(
                leave_one_out(),
                rewards,
                implicit_rewards(),
                reward_to_go(),
                whiten(),
            ),
            None,
        ),
        "KL in the reward": (chain(rewards, kl_in_reward(fixed_kl(0.1))), None),
        "importance weights": (chain(rewards, importance_weights()), None),
    }


def seconds(fn: Callable[[], Tensor]) -> float:
    start = time.process_time()
    fn()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 1024), ("tokens", 8192), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    batch = make_batch(args.rows, args.tokens)
    print(f"{args.rows} x {args.tokens}, one thread, median CPU-seconds of {args.rounds}")
    print(f"{'':28}{'funrl':>8}{'loops':>8}{'ratio':>8}")
    for name, (piece, loop) in cases().items():

        def ours(piece: Advantage = piece) -> Tensor:
            assert batch.score is not None
            return piece.update(Signal(batch.score, batch.mask), piece.init(), batch)[0].x

        times: tuple[list[float], list[float]] = ([], [])
        if loop is not None:
            torch.testing.assert_close(ours(), loop(batch), rtol=1e-3, atol=1e-3)
        for _ in range(args.rounds):
            times[0].append(seconds(ours))
            if loop is not None:
                times[1].append(seconds(lambda loop=loop: loop(batch)))
        mine = statistics.median(times[0])
        line = f"{name:28}{mine:8.3f}"
        if times[1]:
            theirs = statistics.median(times[1])
            line += f"{theirs:8.3f}{theirs / mine:8.1f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
