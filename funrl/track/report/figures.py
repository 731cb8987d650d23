"""The figures of a report: which metrics share one, and how it is drawn."""

from __future__ import annotations

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
    Chart("Throughput", "tokens a second", (("perf/tokens_per_s", "tokens/s"),)),
    Chart("Memory", "GB at its peak", (("memory/peak_gb", "peak"),)),
)
