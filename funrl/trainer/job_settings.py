"""Flags of what a run does: its models, prompts and rewards or texts, its length, and what it keeps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from funrl import seeds
from funrl.rewards.named import VERIFIERS
from funrl.tasks import arithmetic
from funrl.trainer.declaration import RL, SUPERVISED, Bound, above, at_least, below, flag, one_of

INTERVAL = re.compile(r"(\d{1,9})([smh]?)")


@dataclass(frozen=True)
class JobSettings:
    """The flags of the group "job"."""

    model: str | None = flag(
        None,
        "job",
        "Hugging Face directory, or name of a model in its local cache",
        chosen="a small decoder from scratch",
    )
    model_code: str = flag(
        "auto", "job", "whose code computes models: native, this package's decoder; hf, transformers' own, data "
        "parallel only; auto: native where it can",
        one_of("auto", "native", "hf"), requires="model",
    )  # fmt: skip
    resize_vocab: bool = flag(
        False, "job", "give the model rows for tokens that only its tokenizer has, each the mean of the others",
        requires="model",
    )  # fmt: skip
    task: str = flag(
        "arithmetic", "job", "the embedded task, unless --prompts or --data is given; arithmetic_moe: by a decoder "
        "with experts",
        one_of(*arithmetic.MODELS),
    )  # fmt: skip
    prompts: str | None = flag(
        None, "job", "prompts, text or chat messages, with fields: a .jsonl, .json, .csv or .parquet file, a directory "
        "that `datasets` saved, or a dataset in the local Hugging Face cache, such as openai/gsm8k:main:train; several "
        "as a.jsonl@0.7,b.parquet@0.3",
        kinds=RL,
    )  # fmt: skip
    reward: str | None = flag(
        None,
        "job",
        "FILE.py:function, of (prompt, completion, **fields), or one of "
        f"{', '.join(VERIFIERS)}; several as math,format@0.1",
        kinds=RL,
    )
    reward_model: str | None = flag(
        None, "job", "directory of a reward model, whose scores are added to those of --reward or of the embedded "
        "task, times 0.5 with DIR@0.5; with --prompts it may be all that scores",
        kinds=RL,
    )  # fmt: skip
    process_reward_model: str | None = flag(
        None, "job", "directory of a reward model that scores the end of every step of a completion", kinds=RL
    )
    process_reward: str | None = flag(
        None, "job", "what its scores are: each a reward of the token that ends the step, or one reward of the "
        "completion",
        one_of("each", "min", "mean", "last", "product"), kinds=RL, requires="process_reward_model",
        chosen="each, where the algorithm reads rewards of tokens, else min",
    )  # fmt: skip
    step_separator: str | None = flag(
        None, "job", "text between two steps of a solution, such as \\n\\n for an empty line",
        chosen="\\n; in the embedded task every token is a step",
    )  # fmt: skip
    judge: str | None = flag(
        None, "job", "directory of a model that writes a verdict on each completion, which is a reward", kinds=RL
    )
    judge_template: str | None = flag(
        None, "job", "file with the text that it is given, in which {{prompt}}, {{completion}} and {{FIELD}} stand",
        kinds=RL, requires="judge", chosen="a plain request for a number from 0 to 10",
    )  # fmt: skip
    judge_pattern: str = flag(
        r"\[\[(-?[\d.]+)\]\]", "job", "regular expression whose last match in a verdict has the number",
        kinds=RL, requires="judge",
    )  # fmt: skip
    judge_max_new_tokens: int = flag(256, "job", "tokens of a verdict", at_least(1), kinds=RL, requires="judge")
    reward_weights: str | None = flag(
        None, "job", "one number for each of --reward, then for --reward_model, --process_reward_model and --judge: "
        "1,0.5",
        chosen="those in --reward and DIR@0.5, else 1", kinds=RL,
    )  # fmt: skip
    on_reward_error: str = flag(
        "stop", "job", "where a reward fails: stop the run, take it as zero, or skip the completion in training",
        one_of("stop", "zero", "skip"), kinds=RL,
    )  # fmt: skip
    reward_workers: int | None = flag(
        None, "job", "processes of a rank that run --reward while it generates; 0: the rank does, afterwards",
        at_least(0), kinds=RL,
        chosen="the rank's share of the cores, up to 16 where functions mostly wait; 0 with the embedded task",
    )  # fmt: skip
    reward_timeout: float | None = flag(
        None, "job", "seconds that a call of a reward function may take in a worker", above(0), chosen="600", kinds=RL
    )
    data: str | None = flag(
        None,
        "job",
        'file to learn from, or several, as --prompts takes them, each record {"prompt": ..., "completion": ...}, for '
        'kto with a "label", {"prompt": ..., "chosen": ..., "rejected": ...}, or of steps {"prompt": ..., '
        '"completions": [...], "labels": [...]}',
        chosen="made of the embedded task",
        kinds=SUPERVISED,
    )
    fields: str | None = flag(
        None, "job", "columns of --prompts or --data that have other names: prompt:question,answer:extra_info.answer"
    )
    eval_data: str | None = flag(
        None, "job", "held-out data, as --prompts or --data", chosen="a tenth of these, which --seed chooses"
    )
    prompt_template: str | None = flag(
        None, "job", "text, or a .txt file of it, with {prompt} where a prompt that is text goes",
        Bound("a text with {prompt} in it, or a .txt file", lambda x: "{prompt}" in x or x.endswith((".txt", ".md"))),
    )  # fmt: skip
    system_prompt: str | None = flag(
        None, "job", "text, or a .txt file of it, of a system message before prompts that begin with none"
    )
    few_shot: str | None = flag(
        None, "job", "solved examples before every prompt: FILE:n, the first n records, each with a prompt and a "
        "completion, answer or solution",
        kinds=RL,
    )  # fmt: skip
    chat_template: str | None = flag(
        None, "job", "FILE.jinja instead of the tokenizer's chat template, or own, the tokenizer's: with this flag, "
        "--system_prompt, --tools or --template_arguments a prompt that is text is a user's message",
        Bound("own, or a .jinja file", lambda x: x == "own" or x.endswith(".jinja")),
    )  # fmt: skip
    tools: str | None = flag(None, "job", "FILE.json with a list of JSON schemas of tools, for the chat template")
    template_arguments: str | None = flag(None, "job", "further arguments of the chat template: enable_thinking:false")
    long_prompts: str = flag(
        "error", "job", "what is done with prompts and texts that are too long: error, drop, or truncate, prompts to "
        "their last tokens",
        one_of("error", "drop", "truncate"),
    )  # fmt: skip
    max_prompt_tokens: int | None = flag(
        None, "job", "tokens of a prompt at most", at_least(1), kinds=RL,
        chosen="what --max_new_tokens leaves of the model's positions",
    )  # fmt: skip
    max_text_tokens: int | None = flag(
        None, "job", "tokens of a prompt and its completion at most", at_least(2), kinds=SUPERVISED,
        chosen="the model's positions",
    )  # fmt: skip
    curriculum: str | None = flag(
        None, "job", "FILE.py:function that weights the prompts before each step, by the metrics so far", kinds=RL
    )
    difficulty: str | None = flag(
        None, "job", "LOW,HIGH or LOW,HIGH,WEIGHT: prompts whose measured pass rate is outside are drawn with this "
        "weight, by default 0.1, and 0 is never again",
        kinds=RL,
    )  # fmt: skip
    teacher: str | None = flag(
        None, "job", "Hugging Face directory of a model to distil from, with the policy's tokenizer"
    )
    teacher_top_k: int = flag(
        64, "job", "most likely tokens of the teacher in each place, for algorithms that read them", at_least(1)
    )
    steps: int = flag(30, "job", "steps, each of one batch of rollouts or of given texts", at_least(1))
    batch_prompts: int = flag(128, "job", "prompts, demonstrations or pairs a step", at_least(1))
    warmstart_steps: int | None = flag(
        None,
        "job",
        "supervised steps before, on imperfect demonstrations",
        at_least(0),
        chosen="the task's, 0 with --model, --prompts or --data",
    )
    seed: int = flag(0, "job", "seed of everything random", at_least(0), below(seeds.LIMIT, "2^63"))
    dry_run: bool = flag(False, "job", "only print memory, traffic and time of a step; needs a config.json")
    prompt_tokens: int | None = flag(
        None,
        "job",
        "tokens of a prompt that --dry_run takes",
        at_least(1),
        chosen="the embedded task's longest, else 512, or what the model has positions for",
        kinds=RL,
        requires="dry_run",
    )
    text_tokens: int | None = flag(
        None,
        "job",
        "tokens of a prompt and its completion that --dry_run takes",
        at_least(1),
        chosen="the embedded task's longest, else --max_text_tokens, else 1024",
        kinds=SUPERVISED,
        requires="dry_run",
    )
    json: bool = flag(False, "job", "print what --dry_run finds as one JSON object", requires="dry_run")
    run_dir: str | None = flag(None, "job", "where results go", chosen="runs/NAME-TIME")
    save_every: str = flag(
        "10m", "job", "steps between checkpoints in --run_dir, such as 50, or a time, such as 10m; 0: none",
        Bound("a number of steps, or a time such as 90s, 10m or 2h", lambda x: INTERVAL.fullmatch(x) is not None),
    )  # fmt: skip
    keep_checkpoints: int = flag(
        2, "job", "newest checkpoints that are kept; so is the one with the best held-out result", at_least(1)
    )
    save_rollouts: int = flag(
        0, "job", "steps between those whose rows and scores are kept, for `funrl replay`; 1: all, 0: none",
        at_least(0),
    )  # fmt: skip
    keep_rollouts: int | None = flag(
        None, "job", "newest of these steps that are kept", at_least(1), chosen="all", requires="save_rollouts"
    )
    resume: bool = flag(False, "job", "continue the run in --run_dir from its newest checkpoint", requires="run_dir")


class Interval(NamedTuple):
    """Interval in steps, or in seconds; 0 of both: never."""

    steps: int
    seconds: float


def save_interval(text: str) -> Interval:
    """The interval that a text such as "50", "90s" or "10m" means."""
    found = INTERVAL.fullmatch(text)
    assert found is not None, text
    number, unit = int(found[1]), found[2]
    return Interval(0 if unit else number, number * {"": 0, "s": 1, "m": 60, "h": 3600}[unit])
