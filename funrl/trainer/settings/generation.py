"""Flags of generation: the engine and sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from funrl.rollout.engine_abilities import ENGINES, EngineAbilities
from funrl.rollout.sampling_parameters import PENALTIES, SMALLEST_TEMPERATURE
from funrl.trainer.settings.declaration import RL, FlagOptions, above, at_least, at_most, flag, one_of


@dataclass(frozen=True)
class EngineSettings:
    """The engine that generates."""

    SHARED: ClassVar[FlagOptions] = {"kinds": RL}

    engine: str = flag("native", "what generates", one_of(*ENGINES))
    engine_url: str | None = flag(
        None, "addresses of vllm_servers, one per data rank", effect="ranks", example="http://localhost:1"
    )
    engine_timeout: float | None = flag(
        None,
        "timeout of a vllm_server's answer, in seconds",
        above(0),
        chosen="600",
        requires="engine_url",
        effect="event",
    )
    kv_cache_gb: float | None = flag(
        None,
        "size of a rank's KV cache for generation, in 1e9 bytes; requests that do not fit wait, or are recomputed",
        above(0),
        chosen="half of the memory that is free when generation starts",
        effect="work",
    )
    decode_rows: int = flag(512, "maximum completions that a rank decodes together", at_least(1), effect="work")
    speculate: int = flag(
        0,
        "tokens drafted per completion by n-gram lookup in its own text and verified in one pass, if few rows are "
        "decoded; 0: none. Drafts do not change completions",
        at_least(0),
        effect="work",
    )
    state_snapshot_tokens: int = flag(
        4096, "tokens between snapshots of recurrent states; 0: none", at_least(0), effect="work"
    )
    queue: str = flag(
        "tickets",
        "how prompts are assigned to generating ranks: tickets, whenever a rank has room; fixed, by their numbers, "
        "which exact repetition of a run on GPUs needs",
        one_of("tickets", "fixed"),
        effect="ranks",
    )
    verify_sync: bool = flag(
        True, "compare the engine's weights with the trainer's bits after each sync", effect="work"
    )
    on_gap: str = flag(
        "say",
        "if engine and trainer differ where the same bits are promised: say it, or stop the run",
        one_of("say", "stop"),
        effect="event",
    )
    probe_sync_every: int = flag(
        50,
        "steps between comparisons of the engine's log-probabilities of a fixed text with the trainer's, from the "
        "first sync on; 0: never",
        at_least(0),
        effect="work",
    )

    @property
    def abilities(self) -> EngineAbilities:
        """Abilities of the engine."""
        return ENGINES[self.engine]


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling."""

    SHARED: ClassVar[FlagOptions] = {"kinds": RL}

    samples_per_prompt: int = flag(8, "completions of each prompt", at_least(1))
    max_new_tokens: int | None = flag(
        None,
        "maximum tokens of a completion",
        at_least(1),
        chosen="the embedded task's; with --prompts 64, or 32 without --model",
    )
    new_tokens_per_step: int | None = flag(
        None,
        "maximum new tokens per step of a completion, below --max_new_tokens, or of all turns of a trajectory; later "
        "steps continue it with their own weights",
        at_least(1),
        chosen="whole completions",
    )
    temperature: float = flag(
        1.0, "of sampling; the trainer's log-probabilities use it too", at_least(SMALLEST_TEMPERATURE)
    )
    top_k: int = flag(0, "sample among the k most likely tokens; 0: all", at_least(0))
    top_p: float = flag(1.0, "sample among the most likely tokens with this total probability", above(0), at_most(1))
    min_p: float = flag(0.0, "minimum probability, relative to the top token", at_least(0), at_most(1))
    repetition_penalty: float = flag(
        1.0, "above 1: makes tokens that already occurred less likely", at_least(PENALTIES[0]), at_most(PENALTIES[1])
    )
    max_refills: int = flag(
        8,
        "maximum batches of prompts sampled until the algorithm's filter has kept a full batch",
        at_least(1),
        effect="event",
        needs="filter",
    )
    empty_filter: str = flag(
        "skip",
        "if the filter keeps nothing: skip the step's update, stop the run, or use the last prompts unfiltered",
        one_of("skip", "stop", "use"),
        needs="filter",
        effect="event",
    )
