"""Flags of generation: the engine and sampling."""

from __future__ import annotations

from dataclasses import dataclass

from funrl.trainer.settings.declaration import (
    RL,
    above,
    at_least,
    at_most,
    flag,
    one_of,
)


@dataclass(frozen=True)
class EngineSettings:
    """The engine that generates."""

    engine: str = flag("native", "what generates", one_of("native", "vllm", "vllm_server", "hf"), kinds=RL)
    engine_url: str | None = flag(
        None,
        "addresses of a vllm_server for each data rank",
        kinds=RL,
        effect="ranks",
        example="http://localhost:1",
    )
    engine_timeout: float | None = flag(
        None,
        "seconds that such a server may be silent",
        above(0),
        kinds=RL,
        chosen="600",
        requires="engine_url",
        effect="event",
    )
    kv_cache_gb: float | None = flag(
        None,
        "keys and values that a rank may keep while it generates, in 1e9 bytes; what does not fit waits, "
        "or is computed again",
        above(0),
        kinds=RL,
        chosen="half of the memory that is free then",
        effect="work",
    )
    decode_rows: int = flag(
        512,
        "completions that a rank decodes together at most",
        at_least(1),
        kinds=RL,
        effect="work",
    )
    speculate: int = flag(
        0,
        "tokens of a completion that are drafted by what followed before in its text, and drawn in one "
        "pass where few rows are decoded; 0: none. A draft changes no completion",
        at_least(0),
        kinds=RL,
        effect="work",
    )
    queue: str = flag(
        "tickets",
        "how prompts come to ranks that generate: tickets, as a rank has room for them; fixed, by their "
        "numbers, which a run on GPUs needs to be repeated exactly",
        one_of("tickets", "fixed"),
        kinds=RL,
        effect="ranks",
    )
    verify_sync: bool = flag(
        True,
        "compare every bit of the engine's weights and the trainer's after each sync",
        kinds=RL,
        effect="work",
    )
    probe_sync_every: int = flag(
        50,
        "steps between syncs after which the engine's log-probabilities of a fixed text are compared with "
        "the trainer's; so they are after the first; 0: never",
        at_least(0),
        kinds=RL,
        effect="work",
    )


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling."""

    samples_per_prompt: int = flag(8, "completions of each prompt", at_least(1), kinds=RL)
    max_new_tokens: int | None = flag(
        None,
        "tokens a completion may have",
        at_least(1),
        kinds=RL,
        chosen="the embedded task's; with --prompts 64, or 32 without --model",
    )
    new_tokens_per_step: int | None = flag(
        None,
        "tokens that a completion may be continued by in a step, fewer than --max_new_tokens; the rest is "
        "written in later steps, by their weights",
        at_least(1),
        kinds=RL,
        chosen="whole completions",
    )
    temperature: float = flag(1.0, "of sampling; the trainer's log-probabilities use it too", above(0), kinds=RL)
    top_k: int = flag(0, "sample among the k most likely tokens; 0: all", at_least(0), kinds=RL)
    top_p: float = flag(
        1.0,
        "sample among the most likely tokens of this total probability",
        above(0),
        at_most(1),
        kinds=RL,
    )
    min_p: float = flag(0.0, "tokens with this part of the top probability", at_least(0), at_most(1), kinds=RL)
    repetition_penalty: float = flag(1.0, "above 1 makes tokens that were there less likely", above(0), kinds=RL)
    max_refills: int = flag(
        8,
        "prompts are sampled until the algorithm's filter keeps a batch of them, at most so many batches",
        at_least(1),
        kinds=RL,
        effect="event",
        needs="filter",
    )
    empty_filter: str = flag(
        "skip",
        "where the filter keeps nothing: count the step without an update, stop the run, or use the last "
        "prompts as they are",
        one_of("skip", "stop", "use"),
        kinds=RL,
        needs="filter",
        effect="event",
    )
