"""Flags of a run as a whole: its length, its directory, and its dry run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from funrl import seeds
from funrl.trainer.settings.declaration import RL, SUPERVISED, Bound, FlagOptions, at_least, below, flag, one_of

INTERVAL = re.compile(r"(\d{1,9})([smh]?)")
LENGTHS = r"mean:\d{1,9},max:\d{1,9}(,spread:\d{1,3}(\.\d{1,9})?)?"
HARDWARE_NAMES = ("a100", "h100", "h200", "gb200", "mi300x", "v5e", "v5p", "v6e", "cpu")


@dataclass(frozen=True)
class RunSettings:
    """Length of a run, and its directory."""

    steps: int = flag(30, "steps, each on one batch of rollouts or of given texts", at_least(1))
    batch_prompts: int = flag(128, "prompts, demonstrations or pairs per step", at_least(1))
    warmstart_steps: int | None = flag(
        None,
        "supervised steps before RL, on imperfect demonstrations",
        at_least(0),
        chosen="the task's, 0 with --model, --prompts or --data",
        unless=("model",),
    )
    seed: int = flag(0, "seed of everything random", at_least(0), below(seeds.LIMIT, "2^63"))
    run_dir: str | None = flag(None, "where results go", chosen="runs/NAME-TIME", effect="files")
    save_every: str = flag(
        "10m",
        "steps between checkpoints in --run_dir, such as 50, or a time, such as 10m; 0: none",
        Bound("a number of steps, or a time such as 90s, 10m or 2h", lambda x: INTERVAL.fullmatch(x) is not None),
        effect="files",
        example="1",
    )
    keep_checkpoints: int = flag(
        2,
        "number of newest checkpoints to keep; the one with the best held-out result is kept too",
        at_least(1),
        effect="files",
    )
    save_rollouts: int = flag(
        0,
        "steps between steps whose rows and scores are saved for `funrl replay`; 1: every step, 0: none",
        at_least(0),
        effect="files",
    )
    keep_rollouts: int | None = flag(
        None,
        "number of newest saved steps to keep",
        at_least(1),
        chosen="all",
        requires="save_rollouts",
        effect="files",
    )
    env_check: str = flag(
        "on", "try an episode of --env before anything is started", one_of("on", "off"), kinds=RL, effect="event"
    )
    resume: bool = flag(
        False, "continue the run in --run_dir from its newest checkpoint", requires="run_dir", effect="output"
    )
    overwrite: bool = flag(
        False, "start over in a --run_dir whose earlier run completed no step", requires="run_dir", effect="output"
    )


@dataclass(frozen=True)
class AsynchronySettings:
    """Asynchrony of trainer ranks and generator ranks."""

    SHARED: ClassVar[FlagOptions] = {"kinds": RL, "requires": "staleness"}

    staleness: int = flag(0, "versions that a group may be behind when it begins", at_least(0))
    window: int = flag(1, "places among which finished groups are consumed", at_least(1), effect="output")
    clock: str = flag(
        "wall",
        "what orders groups and weights; tokens: iterations of the engines, so that two runs are the same",
        one_of("wall", "tokens"),
        effect="output",
    )
    keep_cache: bool = flag(False, "keep keys and values of running sequences under new weights")


@dataclass(frozen=True)
class EstimateSettings:
    """Dry run."""

    SHARED: ClassVar[FlagOptions] = {"requires": "dry_run", "effect": "output"}

    dry_run: bool = flag(False, "only print a step's memory, traffic and time; needs a config.json")
    prompt_tokens: int | None = flag(
        None,
        "tokens of a prompt that --dry_run assumes",
        at_least(1),
        chosen="the embedded task's longest, else 512 or the model's positions",
        kinds=RL,
    )
    text_tokens: int | None = flag(
        None,
        "tokens of a prompt and its completion that --dry_run assumes",
        at_least(1),
        chosen="the embedded task's longest, else --max_text_tokens, else 1024",
        kinds=SUPERVISED,
    )
    assume_pictures: int | None = flag(
        None, "pictures of a prompt or text that --dry_run assumes", at_least(0), chosen="the embedded task's, else 1"
    )
    assume_turns: int | None = flag(
        None,
        "replies of an episode that --dry_run assumes",
        at_least(1),
        chosen="the embedded task's, else 2",
        kinds=RL,
    )
    assume_turn_tokens: int | None = flag(
        None,
        "tokens before each reply but an episode's first that --dry_run assumes",
        at_least(0),
        chosen="the embedded task's, else 64",
        kinds=RL,
    )
    assume_tool_seconds: float | None = flag(
        None, "seconds of the environment between two replies that --dry_run assumes", at_least(0), chosen="0", kinds=RL
    )
    lengths: str | None = flag(
        None,
        "completions that --dry_run simulates",
        Bound(
            "mean:TOKENS,max:TOKENS[,spread:DEVIATION], or a run directory",
            lambda x: re.fullmatch(LENGTHS, x) is not None or (Path(x) / "metrics.jsonl").is_file(),
        ),
        chosen="a mean of half of --max_new_tokens",
        kinds=RL,
        example="mean:4,max:8",
    )
    json: bool = flag(False, "print the result of --dry_run as one JSON object")
    hardware: str | None = flag(
        None, "GPU or TPU whose memory and speed --dry_run assumes", one_of(*HARDWARE_NAMES), chosen="h100"
    )


class Interval(NamedTuple):
    """Interval in steps or in seconds; both 0: never."""

    steps: int
    seconds: float


def save_interval(text: str) -> Interval:
    """The interval that a text such as "50", "90s" or "10m" means."""
    unit = text[-1:].strip("0123456789")
    number = int(text.removesuffix(unit))
    return Interval(0 if unit else number, number * {"": 0, "s": 1, "m": 60, "h": 3600}[unit])
