"""Every argument of a recipe that is a flag changes the algorithm: its numbers on one batch, or what it declares."""

import contextlib
import functools
import re

import pytest
import torch
from pieces import example, policy_logp
from rows_preference import pairs_of_example, triples_of_example
from rows_terms import less_likely, with_top_tokens
from selection import quick

from funrl.algos import NAMES, apply_advantage, reads, recipe
from funrl.batch import Batch, as_dict
from funrl.flags.arguments import arguments_of
from funrl.trainer.settings.settings import settings_flags

MADE = {"advantage", "returns", "weight", "imitated", "selected", "entropy_coefficient", "prompt_tokens", "sampled"}
NUMBERS = (0.05, 0.3, 0.45, 1.2, 1.7, 3.0, 6.0, 0.999)
TEXTS = {  # values of arguments that are words
    "kl_kind": "k1",
    "pf_ppo.kind": "max_min",
    "dppo.kind": "kl",
    "dppo.sampled_by": "old_logp",
    "distillation.kind": "forward",
    "dpo.loss": "hinge",
    "online_dpo.loss": "hinge",
    "dpo.divergence": "js",
    "spin.loss": "hinge",
    "rollout_is.sampled_by": "old_logp",
}
GIVEN_SIDE_BY_SIDE = {"pair": pairs_of_example, "demonstrated": pairs_of_example, "triple": triples_of_example}
BESIDE = {  # what an argument needs beside it to act
    "kl_target": {"kl_coef": 0.1},
    "kl_kind": {"kl_coef": 0.1},
    "kl_bias_corrected": {"kl_coef": 0.1},
    "dpo.weight_bound": {"on_policy": True},
    "dapo.overlong_buffer": {"max_new_tokens": 6},
    "dapo.overlong_coef": {"max_new_tokens": 6},
    "distillation.rest": {"kind": "forward"},
    "dpo.divergence_alpha": {"divergence": "alpha"},
}


OF_EPISODES = {  # they act where agents write in turns, or where an advantage is below 0; rows_steps.py has such rows
    "mt_grpo.turn_coef",
    "hierarchical_grpo.proposers",
    "rae.clip_low",
    "echo.observation_coef",
    "treepo.subtree_sizes",
    "echo.others",
    "compaction.summaries",
}


def of_flag(table, name, key, default):
    """The entry of a recipe's argument, or of all arguments of that name."""
    return table.get(f"{name}.{key}", table.get(key, default))


def own_flags(name):
    """The flags of a recipe beside the common ones."""
    flags = arguments_of(recipe(name), name)[0]
    return {key: flag for key, flag in flags.items() if key not in settings_flags()}


def other_values(name, key, flag):
    """Values of a flag, not its default, that its type and its bounds allow."""
    if flag.type is bool:
        return [not flag.default]
    choices = [match[1].split(", ") for bound in flag.bounds if (match := re.match("one of (.*)", bound.text))]
    words = choices[0] if choices else [of_flag(TEXTS, name, key, flag.default)]
    numbers = {float: NUMBERS, int: (1, 2, 3, 5, 9)}.get(flag.type, words)
    return [value for value in numbers if value != flag.default and not flag.problem(value)]


@functools.cache
def batches():
    """Two batches, each with the policy's log-probabilities; of the second all ratios are above 1."""
    first, second = example(), example(seed=1)
    wholes = first, less_likely(second)
    return [(with_top_tokens(whole), policy_logp(of)) for whole, of in zip(wholes, (first, second), strict=True)]


def fingerprints(algorithm):
    """Numbers and declarations of an algorithm on two batches, one after the other."""
    for batch, logp in batches():
        yield numbers(algorithm, batch, logp)


def differs(algorithm, before):
    return any(x != y for x, y in zip(fingerprints(algorithm), before, strict=True))


def numbers(algorithm, whole, logp):
    needed = reads(algorithm).required
    held = as_dict(whole._replace(score=whole.score.sigmoid()))
    batch = Batch(**{k: v for k, v in held.items() if k not in MADE or k in needed})
    out = [algorithm.example, algorithm.divergence, sorted(needed), sorted(algorithm.losses)]
    if algorithm.filter is not None:
        out.append(algorithm.filter(batch).tolist())
    if algorithm.advantage is not None:
        state = algorithm.advantage.init()
        out.append(repr(state))
        for _ in range(2):  # a state that is carried on acts in the second step
            made, state, metrics = apply_advantage(algorithm.advantage, state, batch)
            out += [
                made.get(name).tolist() for name in ("advantage", "returns", "weight") if made.get(name) is not None
            ]
            out += [made.mask.tolist(), *(metric.value.item() for metric in metrics.values())]
        batch, logp = made, logp[: len(made.mask)]
    if algorithm.example in GIVEN_SIDE_BY_SIDE:
        batch = GIVEN_SIDE_BY_SIDE[algorithm.example](whole)
        logp = batch.old_logp
    for loss in algorithm.losses.values():
        leaf = logp.clone().requires_grad_()
        value, metrics = loss(leaf, batch)
        if value.requires_grad:
            out.append(torch.autograd.grad(value, leaf)[0].tolist())
        out += [value.item(), *(metric.value.item() for metric in metrics.values())]
    return repr(out)


@pytest.mark.parametrize(
    "name", quick(NAMES, ("ppo", "grpo", "dapo", "gspo", "sft", "dpo", "kto", "gkd", "reward_model"))
)
def test_every_flag_of_a_recipe_changes_the_algorithm(name):
    idle, default = [], list(fingerprints(recipe(name)()))
    for key, flag in own_flags(name).items():
        if f"{name}.{key}" in OF_EPISODES:
            continue
        beside = of_flag(BESIDE, name, key, {})
        before = list(fingerprints(recipe(name)(**beside))) if beside else default
        for value in other_values(name, key, flag):
            with contextlib.suppress(ValueError):  # not with the other defaults
                if differs(recipe(name)(**beside | {key: value}), before):
                    break
        else:
            idle.append(key)
    assert not differs(recipe(name)(), default), "the same recipe twice"
    assert idle == []
