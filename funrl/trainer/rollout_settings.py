"""Flags of generation: the engine, sampling, and what is compared after a sync."""

from __future__ import annotations

from dataclasses import dataclass

from funrl.trainer.declaration import RL, above, at_least, at_most, flag, one_of


@dataclass(frozen=True)
class RolloutSettings:
    """The flags of the group "rollout"."""

    engine: str = flag(
        "native", "rollout", "what generates", one_of("native", "vllm", "vllm_server", "hf"), kinds=RL
    )  # fmt: skip
    engine_url: str | None = flag(
        None, "rollout", "addresses of a vllm_server for each data rank",
        kinds=RL,
    )  # fmt: skip
    engine_timeout: float | None = flag(
        None, "rollout", "seconds that such a server may be silent", above(0),
        kinds=RL, chosen="600", requires="engine_url",
    )  # fmt: skip
    samples_per_prompt: int = flag(8, "rollout", "completions of each prompt", at_least(1), kinds=RL)
    max_new_tokens: int | None = flag(
        None, "rollout", "tokens a completion may have", at_least(1), kinds=RL,
        chosen="the embedded task's; with --prompts 64, or 32 without --model",
    )  # fmt: skip
    new_tokens_per_step: int | None = flag(
        None, "rollout", "tokens that a completion may be continued by in a step, fewer than --max_new_tokens; the "
        "rest is written in later steps, by their weights",
        at_least(1), kinds=RL, chosen="whole completions",
    )  # fmt: skip
    temperature: float = flag(
        1.0, "rollout", "of sampling; the trainer's log-probabilities use it too", above(0), kinds=RL
    )
    top_k: int = flag(0, "rollout", "sample among the k most likely tokens; 0: all", at_least(0), kinds=RL)
    top_p: float = flag(
        1.0, "rollout", "sample among the most likely tokens of this total probability", above(0), at_most(1), kinds=RL
    )
    min_p: float = flag(
        0.0, "rollout", "tokens with this part of the top probability", at_least(0), at_most(1),
        kinds=RL,
    )  # fmt: skip
    repetition_penalty: float = flag(
        1.0, "rollout", "above 1 makes tokens that were there less likely", above(0), kinds=RL
    )
    max_refills: int = flag(
        8, "rollout", "prompts are sampled until the algorithm's filter keeps a batch of them, at most so many batches",
        at_least(1), kinds=RL,
    )  # fmt: skip
    verify_sync: bool = flag(
        True, "rollout", "compare all bits of the engine's weights with the trainer's after every sync", kinds=RL
    )  # fmt: skip
    probe_sync_every: int = flag(
        50, "rollout", "steps between syncs after which the engine's log-probabilities of a fixed text are compared "
        "with the trainer's; so they are after the first; 0: never",
        at_least(0), kinds=RL,
    )  # fmt: skip
