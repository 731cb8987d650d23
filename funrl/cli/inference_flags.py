"""Flags of `funrl evaluate`, `funrl generate` and `funrl serve`.

They have the names and meanings of a run's flags of prompts, rewards, devices and sampling. Nothing here imports torch.
"""

from __future__ import annotations

from funrl.flags import parser as flags
from funrl.trainer.settings.declaration import RUN_KINDS, Flag, at_least, at_most, one_of
from funrl.trainer.settings.scorers import EPISODE_FLAGS
from funrl.trainer.settings.settings import settings_flags

OF_TRAINING = ("process_reward", "verify_sync", "on_gap", "numerics", "probe_sync_every")


def of_groups(*groups: str) -> tuple[str, ...]:
    """Names of the flags of some groups that act without training."""
    return tuple(name for name, x in settings_flags().items() if x.group in groups and name not in OF_TRAINING)


STEPS = "step_separator"  # of completions, which only process rewards read
PROMPTS = (
    *("fields", "long_prompts", "max_prompt_tokens", "max_new_tokens"),
    *(name for name in of_groups("formatting") if name != STEPS),
)
REWARDS = (STEPS, *of_groups("rewards", "judging"))
DEVICES = ("mesh", "generate_mesh", "device", "dtype", "compile", "model_code", *of_groups("engines"), "timeout")
SAMPLED = ("samples", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # a run has them as --eval_...
SAMPLED_TEXTS = {
    "samples": "completions of each prompt, for pass@k and maj@k; more than one needs a temperature",
    "temperature": "sampling temperature; 0 is greedy; the model's is in generation_config.json",
}
USAGES = {
    "evaluate": "funrl evaluate MODEL --data=FILE --reward=FILE.py:function [--env=FILE.py:NAME]",
    "generate": 'funrl generate MODEL ["a prompt" ...] [--prompts=FILE] [--flag=value ...]',
    "serve": "funrl serve MODEL [--port=N] [--flag=value ...]",
}
_OUTPUT = Flag("output", None, str, optional=True, text="", group="outputs")
OUTPUT = {
    "evaluate": _OUTPUT._replace(
        text="directory for evaluation.json and eval_samples.jsonl", chosen="runs/evaluate-TIME"
    ),
    "generate": _OUTPUT._replace(text="file of JSON lines", chosen="printed"),
}
SUMMARY = {
    "evaluate": "Complete and reward prompts. MODEL is a Hugging Face directory, a name in the local cache, or the "
    "directory of a run, whose flags are the defaults and whose held-out prompts are used without --data.",
    "generate": "Complete prompts. MODEL is a Hugging Face directory, a name in the local cache, or the directory of a "
    "run. Completions are printed, or written as JSON lines with the columns of their prompts. Prompts that begin with "
    "a dash go after --.",
    "serve": "Serve a model over HTTP, in the dialects of OpenAI and Anthropic. MODEL is a Hugging Face directory, a "
    "name in the local cache, or the directory of a run. Sampling flags hold where a request has none of its own.",
}
PORT = (at_least(0), at_most(65535))
SERVE = (
    Flag("host", "127.0.0.1", str, False, text="address to listen at", group="run"),
    Flag("port", 8000, int, False, text="port to listen at; 0: a free one", group="run", bounds=PORT),
    Flag("api_key", None, str, True, text="key that clients give", group="run", chosen="$FUNRL_API_KEY, or new"),
)
SERVED = ("chat_template", "template_arguments", "max_new_tokens")


def inference_flags(name: str) -> list[Flag]:
    """The flags of "evaluate", "generate" or "serve"."""
    table = settings_flags()
    if name == "serve":
        return _serve_flags()
    data = "data" if name == "evaluate" else "prompts"
    own = [
        Flag(data, None, str, optional=True, text="prompts, in the forms of a run's --prompts", group="examples"),
        Flag(
            "step",
            None,
            int,
            optional=True,
            text="step of a run's checkpoint",
            chosen="the run's final model, else its newest checkpoint",
            group="models",
            bounds=(at_least(0),),
        ),
        Flag(
            "limit",
            None,
            int,
            optional=True,
            text="maximum number of prompts, chosen by --seed",
            chosen="all",
            group="examples",
            bounds=(at_least(1),),
        ),
        OUTPUT[name],
        table["seed"]._replace(text="seed of the samples"),
    ]
    names = (*PROMPTS, *(REWARDS if name == "evaluate" else ()), "env", "env_args", *EPISODE_FLAGS, *DEVICES)
    shared = [table[flag]._replace(requires="", kinds=RUN_KINDS) for flag in names if flag != "device"]
    shared.append(table["device"]._replace(text="where tensors live", bounds=(one_of("cpu", "cuda"),)))
    texts = {flag: table[flag].text for flag in SAMPLED[2:]} | SAMPLED_TEXTS
    sampling = [
        table[f"eval_{flag}"]._replace(name=flag, group="sampling", kinds=RUN_KINDS, text=texts[flag])
        for flag in SAMPLED
    ]
    return [*own, *shared, *sampling]


def _serve_flags() -> list[Flag]:
    whole = {flag.name: flag for flag in inference_flags("generate")}
    names = ("step", *SERVED, *DEVICES, *(name for name in SAMPLED if name != "samples"), "seed")
    bound = {"max_new_tokens": "bound on the tokens of a reply"}
    own = [whole[name]._replace(text=bound.get(name, whole[name].text)) for name in names]
    own = [flag._replace(default=1.0) if flag.name == "temperature" else flag for flag in own]  # as clients expect
    return [*SERVE, *own]


def inference_help(name: str) -> str:
    """The help of a command."""
    whole = flags.help_text("", SUMMARY[name], inference_flags(name), None)
    return "\n".join([USAGES[name], *whole.splitlines()[1:]])
