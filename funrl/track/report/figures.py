"""The figures of a report: which metrics share one, and how it is drawn."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple


class Chart(NamedTuple):
    """One figure.

    Attributes:
      keys: the metrics of its curves, with their names.
      bounds: of the y axis; None: as the values are.
      dots: its values are few, and each is drawn as a dot.
    """

    title: str
    unit: str
    keys: tuple[tuple[str, str], ...] = ()
    log: bool = False
    bounds: tuple[float, float] | None = None
    dots: bool = False


REWARD_CHARTS = (
    Chart("Reward", "mean of the step's completions", (("reward/mean", "sampled"), ("eval/reward", "held out"))),
    Chart(
        "Accuracy",
        "share of held-out problems solved: reward 1 or more",
        (("eval/accuracy", "held out"),),
        bounds=(0.0, 1.0),
        dots=True,
    ),
)
LOSS = Chart("Loss", "what the gradient step minimises", (("train/loss", "batch"), ("eval/loss", "held out")))
LIKELIHOOD = Chart("Negative log-likelihood", "nats a token", (("actor/nll", "batch"), ("eval/nll", "held out")))
PAIR_CHARTS = (
    LOSS,
    Chart(
        "Pair accuracy",
        "share of pairs whose chosen text scores higher; a tie is one half",
        (("preference/accuracy", "batch"), ("eval/accuracy", "held out")),
        bounds=(0.0, 1.0),
    ),
)
REWARD_MEANS = Chart("Rewards", "mean of each, of the completions to which it applies")
TOOL_CALLS = Chart(
    "Calls of tools",
    "in an episode",
    (("episodes/tool_calls", "calls"), ("episodes/call_errors", "unreadable"), ("episodes/turns", "turns")),
)
FORKS = Chart("Forks by cause", "in an episode: the template renders the history otherwise")
DRIFT = Chart("Drift by cause", "turns of an episode that the template would render otherwise, and that stay")
REWARD_PARTS = Chart("Parts of rewards", "mean of the step's completions or episodes that have them")
BY_SOURCE = {  # metric of a source -> its chart
    "reward": Chart("Reward by source", "mean of the step's episodes that have one"),
    "turns": Chart("Turns by source", "mean of the step's episodes"),
    "tool_calls": Chart("Calls of tools by source", "in an episode"),
    "call_errors": Chart("Unreadable calls by source", "in an episode"),
    "context_tokens": Chart("Context by source", "tokens of an episode that the policy did not sample"),
    "environment_s": Chart("Waiting for environments by source", "seconds of an episode"),
}
SOURCE_CURVES = 8  # colours that differ well
WHOLE_REWARDS = ("mean", "max", "min", "equal_groups", "failed")  # reward/NAME that is no part of a reward
TIME = Chart("By step", "seconds")
CHARTS = (
    LIKELIHOOD,
    Chart("Margin", "chosen score less rejected", (("preference/margin", "batch"), ("eval/margin", "held out"))),
    Chart("Scores", "of a batch's texts", (("preference/chosen", "chosen"), ("preference/rejected", "rejected"))),
    Chart("Scores held out", "of held-out texts", (("eval/chosen", "chosen"), ("eval/rejected", "rejected"))),
    Chart("KL", "nats a token, from the policy that sampled", (("actor/ppo_kl", "KL"),)),
    Chart(
        "KL to the reference",
        "nats a token",
        (("actor/kl_loss", "in the loss"), ("actor/reward_kl_penalty", "in the reward")),
    ),
    Chart("Entropy", "nats a token", (("actor/entropy", "entropy"),)),
    Chart("Clip fraction", "share of tokens", (("actor/pg_clipfrac", "clipped"),)),
    Chart("Policy loss", "what the gradient step minimises", (("actor/pg_loss", "loss"),)),
    Chart("Value loss", "squared reward", (("critic/vf_loss", "loss"),)),
    Chart("Explained variance", "of the returns, by the critic", (("critic/vf_explained_var", "explained"),)),
    Chart("Response length", "tokens", (("response_length/mean", "length"),)),
    Chart("Turns", "mean of the step's episodes", (("episodes/turns", "sampled"), ("eval/episodes/turns", "held out"))),
    Chart(
        "Tokens beside the policy's own",
        "of an episode",
        (("episodes/context_tokens", "context"), ("episodes/recomputed_tokens", "computed again")),
    ),
    Chart("Waiting for environments", "seconds of an episode", (("episodes/environment_s", "seconds"),)),
    Chart(
        "Episodes without a reward",
        "share of the step's episodes",
        (("episodes/failed", "failed"), ("episodes/unscored", "unscored")),
        bounds=(0.0, 1.0),
    ),
    Chart(
        "Log-prob gap",
        "nats, engine against trainer",
        (("rollout/logprob_gap_max", "largest"), ("rollout/logprob_gap_mean", "mean"), ("sync/probe_gap", "probe")),
        log=True,
    ),
    Chart("Gradient norm", "before clipping", (("actor/grad_norm", "norm"),)),
    Chart(
        "Who waited",
        "seconds of a step: the trainer for rows, a replica for the trainer",
        (("wait/trainer_s", "trainer"), ("wait/generator_s", "generators")),
    ),
    Chart("Age of rows", "versions behind, of a step's tokens", (("age/mean", "mean"), ("age/max", "largest"))),
    Chart("Throughput", "tokens a second", (("perf/tokens_per_s", "tokens/s"),)),
    Chart("Memory", "GB at its peak", (("memory/peak_gb", "peak"),)),
)


def charts_of_keys(keys: Collection[str]) -> list[Chart]:
    """Charts whose curves depend on the metrics that runs have.

    They are parts of rewards, calls of tools, forks and drifts by cause, and episodes by source.
    """
    charts = [TOOL_CALLS] if "episodes/tool_calls" in keys else []
    for chart, pattern in (
        (REWARD_PARTS, rf"reward/(?!(?:{'|'.join(WHOLE_REWARDS)})$)([^/]+)"),
        (FORKS, r"episodes/forks/(.+)"),
        (DRIFT, r"episodes/drift/(.+)"),
    ):
        charts += _of_pattern(chart, pattern, keys)
    for metric, chart in BY_SOURCE.items():
        charts += _of_pattern(chart, rf"source/([^/]+)/{metric}", keys)
    return charts


def _of_pattern(chart: Chart, pattern: str, keys: Collection[str]) -> list[Chart]:
    """A chart of the metrics whose names have a pattern, with the text of its group as the curves' names."""
    matches = [re.fullmatch(pattern, key) for key in sorted(keys)]
    curves = tuple((match[0], match[1]) for match in matches if match)[:SOURCE_CURVES]
    return [chart._replace(keys=curves)] if curves else []
