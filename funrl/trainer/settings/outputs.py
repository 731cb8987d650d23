"""Flags of evaluations, trackers, samples and profiles."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from funrl.rollout.sampling_parameters import PENALTIES, SMALLEST_TEMPERATURE
from funrl.trainer.settings.declaration import RL, Bound, above, at_least, at_most, flag, some_of

TRACKERS = ("wandb", "mlflow")

PROFILE = r"([1-9]\d{0,8}):([1-9]\d{0,3})"  # STEP:COUNT


@dataclass(frozen=True)
class EvaluationSettings:
    """Evaluation."""

    eval_every: int = flag(10, "steps between evaluations; first and last always evaluate", at_least(1))
    eval_prompts: int = flag(256, "held-out prompts, demonstrations or pairs", at_least(1))
    eval_samples: int = flag(
        1,
        "completions of each held-out prompt, for pass@k and maj@k; more than one needs a temperature",
        at_least(1),
        kinds=RL,
    )
    eval_temperature: float | None = flag(
        None,
        "sampling temperature of evaluation; 0 is greedy; the model's is in generation_config.json",
        Bound(f"0, or at least {SMALLEST_TEMPERATURE}", lambda x: x == 0 or x >= SMALLEST_TEMPERATURE),
        kinds=RL,
        chosen="the model's, else 0",
    )
    eval_top_k: int | None = flag(None, "as --top_k", at_least(0), kinds=RL, chosen="the model's, else 0")
    eval_top_p: float | None = flag(None, "as --top_p", above(0), at_most(1), kinds=RL, chosen="the model's, else 1")
    eval_min_p: float | None = flag(None, "as --min_p", at_least(0), at_most(1), kinds=RL, chosen="the model's, else 0")
    eval_repetition_penalty: float | None = flag(
        None,
        "as --repetition_penalty",
        at_least(PENALTIES[0]),
        at_most(PENALTIES[1]),
        kinds=RL,
        chosen="the model's, else 1",
    )


class ProfileWindow(NamedTuple):
    """Steps that --profile traces: `count` steps from `first` on."""

    first: int
    count: int

    @property
    def last(self) -> int:
        """The last step."""
        return self.first + self.count - 1


@dataclass(frozen=True)
class OutputSettings:
    """Profiles, trackers and samples."""

    profile: str | None = flag(
        None,
        "STEP:COUNT, such as 3:1: trace COUNT steps from STEP on into profile/ of the run directory, for Perfetto or "
        "Chrome",
        Bound("a step and a number of steps, such as 3:1", lambda x: re.fullmatch(PROFILE, x) is not None),
        effect="files",
        example="1:1",
    )
    profile_ranks: str = flag(
        "0",
        "ranks that write a trace: some, such as 0,8, or all",
        Bound("all or some numbers, such as 0,8", lambda x: re.fullmatch(r"all|\d{1,6}(,\d{1,6})*", x) is not None),
        requires="profile",
        effect="ranks",
        example="all",
    )
    report_to: str | None = flag(
        None,
        "further trackers",
        some_of(*TRACKERS)._replace(text=f"some of {','.join(TRACKERS)}; TensorBoard and JSON lines are always there"),
        effect="files",
    )
    sample_every: int = flag(10, "steps between samples", at_least(1), needs="policy")

    @property
    def window(self) -> ProfileWindow | None:
        """The steps of --profile; None: no profile."""
        match = re.fullmatch(PROFILE, self.profile) if self.profile else None
        return None if match is None else ProfileWindow(int(match[1]), int(match[2]))
