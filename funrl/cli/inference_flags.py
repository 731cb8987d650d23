"""The flags of `funrl evaluate` and `funrl generate`: those of a run on prompts, rewards, devices and sampling, by the
same names. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from funrl.flags import parser as flags
from funrl.flags.foreign.aliases import check_names, names_given
from funrl.flags.foreign.renaming import NameContext
from funrl.trainer.settings.declaration import RUN_KINDS, Flag, SettingsError, at_least
from funrl.trainer.settings.settings import settings_flags

PROMPTS = (
    "fields", "prompt_template", "system_prompt", "few_shot", "chat_template", "tools", "template_arguments",
    "long_prompts", "max_prompt_tokens", "max_new_tokens",
)  # fmt: skip
REWARDS = (
    "reward", "reward_model", "process_reward_model", "step_separator", "judge", "judge_template",
    "judge_pattern", "judge_max_new_tokens", "reward_weights", "on_reward_error", "reward_workers", "reward_timeout",
)  # fmt: skip
DEVICES = (
    "mesh", "generate_mesh", "device", "dtype", "compile", "model_code", "engine", "engine_url", "engine_timeout",
    "kv_cache_gb", "decode_rows", "speculate", "queue", "timeout",
)  # fmt: skip
SAMPLED = ("samples", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # --eval_... of a run
SAMPLED_TEXTS = {
    "samples": "completions of each prompt, for pass@k and maj@k; several need a temperature",
    "temperature": "of sampling; 0 is greedy; the model's is in generation_config.json",
}
USAGES = {
    "evaluate": "funrl evaluate MODEL --data=FILE --reward=FILE.py:function [--flag=value ...]",
    "generate": 'funrl generate MODEL ["a prompt" ...] [--prompts=FILE] [--flag=value ...]',
}
SUMMARY = {
    "evaluate": "Complete and reward prompts. MODEL is a Hugging Face directory, a name in the local cache, or the "
    "directory of a run, whose flags are the defaults and whose held-out prompts are taken without --data.",
    "generate": "Complete prompts. MODEL is a Hugging Face directory, a name in the local cache, or the directory of a "
    "run. Completions are printed, or written as JSON lines with the columns of their prompts. Prompts that begin with "
    "a dash go behind --.",
}


class InferenceCommand(NamedTuple):
    """A command line that was read.

    Attributes:
      words: what is no flag: the model, and prompts.
      values: of the flags that were given, by name.
    """

    words: tuple[str, ...]
    values: dict[str, Any]


def inference_flags(name: str) -> list[Flag]:
    """The flags of "evaluate" or "generate"."""
    table = settings_flags()
    data = "data" if name == "evaluate" else "prompts"
    own = [
        Flag(data, None, str, True, "prompts, as --prompts of a run takes them", group="examples"),
        Flag("step", None, int, True, "of a run's checkpoint", "the model at the end of the run, else its newest "
             "checkpoint", "models", (at_least(0),)),
        Flag("limit", None, int, True, "prompts at most, which --seed chooses", "all", "examples", (at_least(1),)),
        Flag("output", None, str, True, *OUTPUT[name], group="outputs"),
        table["seed"]._replace(text="seed of the samples"),
    ]  # fmt: skip
    names = (*PROMPTS, *(REWARDS if name == "evaluate" else ()), *DEVICES)
    shared = [table[one]._replace(requires="", kinds=RUN_KINDS) for one in names]
    texts = {one: table[one].text for one in SAMPLED[2:]} | SAMPLED_TEXTS
    sampling = [
        table[f"eval_{one}"]._replace(name=one, group="sampling", kinds=RUN_KINDS, text=texts[one]) for one in SAMPLED
    ]
    return [*own, *shared, *sampling]


OUTPUT = {
    "evaluate": ("directory for evaluation.json and eval_samples.jsonl", "runs/evaluate-TIME"),
    "generate": ("file of JSON lines", "printed"),
}


def read_inference(name: str, argv: Sequence[str]) -> InferenceCommand:
    """Read a command line.

    Args:
      name: "evaluate" or "generate".
      argv: the program's name and its arguments; what stands behind "--" is no flag.

    Raises:
      SettingsError: a flag is not one, a value cannot work, or there is no model.
    """
    known, argv = inference_flags(name), list(argv)
    end = argv.index("--") if "--" in argv else len(argv)
    flags.refuse_repeated(argv)
    found = flags.read(known, argv[:end])
    table = {flag.name: flag.default for flag in settings_flags().values()}
    check_names(
        names_given(found.unknown), {flag.name: flag for flag in known}, NameContext({}, table, frozenset(), name)
    )
    flags.refuse_unknown([text for text in found.unknown if text.startswith("-")], [flag.name for flag in known])
    words = [*(text for text in found.unknown if not text.startswith("-")), *argv[end + 1 :]]
    if not words:
        raise SettingsError(f"usage: {USAGES[name]}; funrl {name} --help lists the flags")
    return InferenceCommand(tuple(words), {one: found.values[one] for one in sorted(found.given)})


def inference_help(name: str) -> str:
    """The help of a command."""
    whole = flags.help_text("", SUMMARY[name], inference_flags(name), None)
    return "\n".join([USAGES[name], *whole.splitlines()[1:]])
