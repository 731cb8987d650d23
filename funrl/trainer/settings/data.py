"""Flags of data: prompts and texts, and their templates."""

from __future__ import annotations

from dataclasses import dataclass

from funrl.tasks.embedded import TASK_NAMES
from funrl.trainer.settings.declaration import RL, SUPERVISED, Bound, at_least, flag, one_of


@dataclass(frozen=True)
class ExampleSettings:
    """Prompts and texts."""

    task: str = flag(
        "arithmetic",
        "the embedded task, unless --prompts or --data is given",
        one_of(*TASK_NAMES),
        unless=("prompts", "data"),
    )
    prompts: str | None = flag(
        None,
        "prompts, text or chat messages, with fields: a .jsonl, .json, .csv or .parquet file, a directory "
        "that `datasets` saved, or a dataset in the local Hugging Face cache, such as "
        "openai/gsm8k:main:train; several as a.jsonl@0.7,b.parquet@0.3",
        kinds=RL,
    )
    data: str | None = flag(
        None,
        'files to learn from, in the forms of --prompts; each record is {"prompt": ..., "completion": ...}, for kto '
        'with a "label", {"prompt": ..., "chosen": ..., "rejected": ...}, or for labelled steps {"prompt": ..., '
        '"completions": [...], "labels": [...]}',
        chosen="generated from the embedded task",
        kinds=SUPERVISED,
    )
    fields: str | None = flag(
        None, "columns of --prompts or --data for fields with other names: prompt:question,answer:extra_info.answer"
    )
    eval_data: str | None = flag(
        None, "held-out data, as --prompts or --data", chosen="a tenth of these, chosen by --seed"
    )
    long_prompts: str = flag(
        "error",
        "action for prompts and texts that are too long: error, drop, or truncate (prompts keep their last tokens)",
        one_of("error", "drop", "truncate"),
        effect="event",
    )
    max_prompt_tokens: int | None = flag(
        None,
        "maximum tokens of a prompt",
        at_least(1),
        kinds=RL,
        chosen="what --max_new_tokens leaves of the model's positions",
        effect="event",
    )
    max_text_tokens: int | None = flag(
        None,
        "maximum tokens of a prompt and its completion",
        at_least(2),
        kinds=SUPERVISED,
        chosen="the model's positions",
        effect="event",
    )
    max_pixels: int | None = flag(
        None,
        "maximum pixels of a picture: larger ones are made smaller",
        at_least(1),
        chosen="that of the model's preprocessor_config.json, else 1,280 tokens",
    )
    curriculum: str | None = flag(
        None,
        "FILE.py:function that gives the prompts' sampling weights before each step, from the metrics so far",
        kinds=RL,
    )
    difficulty: str | None = flag(
        None,
        "LOW,HIGH or LOW,HIGH,WEIGHT: prompts with a measured pass rate outside LOW..HIGH get this sampling weight, "
        "by default 0.1; 0: never again",
        kinds=RL,
        example="0.1,0.9",
    )


@dataclass(frozen=True)
class FormatSettings:
    """Templates, messages and solved examples around a prompt."""

    prompt_template: str | None = flag(
        None,
        "template of text prompts, with {prompt} where the prompt goes: the text itself, or a .txt file",
        Bound("a text with {prompt} in it, or a .txt file", lambda x: "{prompt}" in x or x.endswith((".txt", ".md"))),
        example="1{prompt}",
    )
    system_prompt: str | None = flag(
        None, "system message before prompts that have none: the text, or a .txt file", example="3"
    )
    few_shot: str | None = flag(
        None,
        "solved examples put before every prompt: FILE:n, the first n records, each with a prompt and a completion, "
        "answer or solution",
        kinds=RL,
    )
    chat_template: str | None = flag(
        None,
        "FILE.jinja replaces the tokenizer's chat template; own: use the tokenizer's. With this flag, "
        "--system_prompt, --tools or --template_arguments, a text prompt becomes a user message",
        Bound("own, or a .jinja file", lambda x: x == "own" or x.endswith(".jinja")),
    )
    tools: str | None = flag(None, "FILE.json with a list of JSON schemas of tools, for the chat template")
    template_arguments: str | None = flag(
        None, "further arguments of the chat template: enable_thinking:false", example="enable_thinking:false"
    )
    step_separator: str | None = flag(
        None,
        "text between two steps of a solution, such as \\n\\n for an empty line",
        chosen="\\n; in the embedded task every token is a step",
        example="+",
    )
