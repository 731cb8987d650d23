"""Flags of rewards and environments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from funrl.rewards.named import VERIFIERS
from funrl.trainer.settings.declaration import RL, FlagOptions, above, at_least, at_most, flag, one_of


@dataclass(frozen=True)
class RewardSettings:
    """Rewards."""

    SHARED: ClassVar[FlagOptions] = {"kinds": RL}

    reward: str | None = flag(
        None,
        "FILE.py:function, of (prompt, completion, **fields), or one of "
        f"{', '.join(VERIFIERS)}; several as math,format@0.1",
    )
    reward_model: str | None = flag(
        None,
        "directory of a reward model, whose scores are added to those of --reward or of the embedded task, times 0.5 "
        "with DIR@0.5; with --prompts it may be the only reward",
    )
    process_reward_model: str | None = flag(None, "directory of a reward model that scores each step of a completion")
    process_reward: str | None = flag(
        None,
        "use of its scores: each, a reward for the token that ends the step; the others, one reward for the completion",
        one_of("each", "min", "mean", "last", "product"),
        requires="process_reward_model",
        chosen="each if the algorithm reads token rewards, else min",
    )
    reward_weights: str | None = flag(
        None,
        "one weight per reward: those of --reward, then --reward_model, --process_reward_model and --judge: 1,0.5",
        chosen="those in --reward and DIR@0.5, else 1",
        example="2",
    )
    on_reward_error: str = flag(
        "stop",
        "if a reward fails: stop the run, use zero, or skip the completion in training",
        one_of("stop", "zero", "skip"),
        effect="event",
    )
    reward_workers: int | None = flag(
        None,
        "processes per rank that run --reward during generation; 0: the rank runs it itself afterwards",
        at_least(0),
        at_most(256),
        chosen="the rank's share of the cores, up to 16 if functions mostly wait; 0 with the embedded task",
        effect="ranks",
    )
    reward_timeout: float | None = flag(
        None, "maximum seconds of a reward function in a worker", above(0), chosen="600", effect="event"
    )


@dataclass(frozen=True)
class EnvironmentSettings:
    """Environments of several turns."""

    SHARED: ClassVar[FlagOptions] = {"kinds": RL}

    env: str | None = flag(
        None,
        "environment that rewards its episodes: FILE.py:NAME, module:NAME, or FRAMEWORK:NAME such as gymnasium:ID",
    )
    env_args: str | None = flag(
        None, "arguments of what --env names, such as attempts:3,reward:math, or a JSON object", example="turns:1"
    )
    agents: str | None = flag(
        None,
        "models of an environment's agents: NAME:policy, NAME:policy:ROLE, NAME:frozen, NAME:frozen:N or NAME:DIR",
        chosen="policy for each",
        example="policy:policy,other:frozen",
    )
    episode_turns: int = flag(16, "maximum replies of the policy in an episode", at_least(1), effect="event")
    episode_tokens: int | None = flag(
        None,
        "maximum tokens that the policy writes in an episode",
        at_least(1),
        chosen="the model's positions",
        effect="event",
    )
    env_timeout: float = flag(60.0, "maximum seconds of an environment between two replies", above(0), effect="event")
    episode_retries: int = flag(
        1,
        "further attempts at an episode whose environment fails; then its group is left out",
        at_least(0),
        effect="event",
    )
    env_workers: int = flag(
        0,
        "processes per rank that run whole episodes, for environments that compute; 0: the rank runs them itself",
        at_least(0),
        at_most(256),
        effect="ranks",
    )
    max_waiting: int = flag(1024, "maximum unfinished episodes of a replica", at_least(1), effect="ranks")
    tool_parser: str | None = flag(
        None,
        "form of calls of tools",
        one_of("hermes", "qwen_xml", "llama_json", "mistral", "harmony", "glm"),
        chosen="by the chat template",
        effect="event",
    )
    tool_tokens: int = flag(
        4096, "maximum tokens of a tool's result; the text says that it was cut", at_least(1), effect="event"
    )
    history: str = flag(
        "append",
        "template: fork where the template renders a history otherwise",
        one_of("append", "template"),
        effect="event",
    )


@dataclass(frozen=True)
class JudgeSettings:
    """A judge that writes verdicts."""

    SHARED: ClassVar[FlagOptions] = {"kinds": RL, "requires": "judge"}

    judge: str | None = flag(
        None, "directory of a model that writes a verdict on each completion; the verdict's score is a reward"
    )
    judge_template: str | None = flag(
        None,
        "file with the judge's prompt, with {{prompt}}, {{completion}} and {{FIELD}} filled in",
        chosen="a plain request for a number from 0 to 10",
    )
    judge_pattern: str = flag(
        r"\[\[(-?[\d.]+)\]\]", "regular expression whose last match in a verdict contains the score", example=r"(\d)"
    )
    judge_max_new_tokens: int = flag(256, "maximum tokens of a verdict", at_least(1))
