"""The charts of a report: which metrics share one, and how it is drawn."""

from __future__ import annotations

from typing import NamedTuple


class Chart(NamedTuple):
    """One chart; a run has it if it has one of its metrics.

    Attributes:
      patterns: regular expressions of the names of its metrics.
      log: whether its axis is logarithmic.
      share: whether its axis is 0 to 1.
    """

    title: str
    unit: str
    patterns: tuple[str, ...]
    log: bool = False
    share: bool = False


MAIN_CHARTS = (
    Chart("Reward", "mean of the step's completions", ("reward/mean", "eval/reward")),
    Chart(
        "Accuracy",
        "share of held-out problems with reward 1 or more, or of pairs whose chosen text scores higher",
        ("preference/accuracy", "eval/accuracy"),
        share=True,
    ),
    Chart("Rewards", "mean of each, of the completions to which it applies", ("reward/.+/mean",)),
    Chart("Loss", "what the gradient step minimises", ("train/loss", "eval/loss")),
    Chart("Negative log-likelihood", "nats a token", ("actor/nll", "eval/nll")),
)
CHARTS = (
    Chart("Margin", "chosen score less rejected", ("preference/margin", "eval/margin")),
    Chart("Scores", "of a batch's texts, and of held-out ones", ("(preference|eval)/(chosen|rejected)",)),
    Chart("KL", "nats a token, from the policy that sampled", ("actor/ppo_kl",)),
    Chart("KL to the reference", "nats a token", ("actor/kl_loss", "actor/reward_kl_penalty")),
    Chart("Entropy", "nats a token", ("actor/entropy",)),
    Chart("Clip fraction", "share of tokens", ("actor/pg_clipfrac",)),
    Chart("Policy loss", "what the gradient step minimises", ("actor/pg_loss",)),
    Chart("Value loss", "squared reward", ("critic/vf_loss",)),
    Chart("Explained variance", "of the returns, by the critic", ("critic/vf_explained_var",)),
    Chart("Response length", "tokens", ("response_length/mean",)),
    Chart("Turns", "mean of the step's episodes", ("episodes/turns", "eval/episodes/turns")),
    Chart("Tokens beside the policy's own", "of an episode", ("episodes/(context|recomputed)_tokens",)),
    Chart("Waiting for environments", "seconds of an episode", ("episodes/environment_s",)),
    Chart("Episodes without a reward", "share of the step's episodes", ("episodes/(failed|unscored)",), share=True),
    Chart(
        "Log-prob gap",
        "nats, engine against trainer; exact zeros are on the lower edge",
        ("rollout/logprob_gap_(max|mean|p50|p99|p999)", "sync/probe_gap"),
        log=True,
    ),
    Chart(
        "Ratio of trainer to engine",
        "of a sampled token's probabilities: mean, and effective sample size as a share",
        ("rollout/(ratio_mean|effective_share)",),
    ),
    Chart("Gradient norm", "before clipping", ("actor/grad_norm",)),
    Chart("Rewards in the gradient", "share of each reward function; they add up to 1", ("reward_gradient/.+/share",)),
    Chart("Who waited", "seconds: a trainer for rows, replicas for it", ("wait/trainer_s", "wait/generator_s")),
    Chart("Places of the ledger", "events of a step", ("places/(begun|lost|refilled|taken)",)),
    Chart("Places in no batch", "written ahead, or parked", ("places/ahead", "partial/unfinished_prompts")),
    Chart("Age of rows", "versions behind, of a step's tokens", ("age/mean", "age/max")),
    Chart("Throughput", "tokens a second", ("perf/tokens_per_s",)),
    Chart("Memory", "GB at its peak", ("memory/peak_gb",)),
    Chart("Calls of tools", "in an episode", ("episodes/tool_calls", "episodes/call_errors")),
    Chart("Parts of rewards", "mean of rows that have them", ("reward/(?!(mean|max|min|equal_groups|failed)$)[^/]+",)),
    Chart("Forks by cause", "in an episode: the template renders the history otherwise", ("episodes/forks/.+",)),
    Chart("Drift by cause", "turns that the template would render otherwise, and that stay", ("episodes/drift/.+",)),
    Chart("Reward by source", "mean of the step's episodes that have one", ("source/[^/]+/reward",)),
    Chart("Turns by source", "mean of the step's episodes", ("source/[^/]+/turns",)),
    Chart("Calls of tools by source", "in an episode", ("source/[^/]+/(tool_calls|call_errors)",)),
    Chart("Context by source", "tokens that the policy did not sample", ("source/[^/]+/context_tokens",)),
    Chart("Waiting for environments by source", "seconds of an episode", ("source/[^/]+/environment_s",)),
)
