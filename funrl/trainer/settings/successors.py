"""Names that earlier versions had, each with what to write instead: flags, commands and values of flags."""

from __future__ import annotations

from typing import NamedTuple


class RemovedFlag(NamedTuple):
    """A flag of an earlier version.

    Attributes:
      default: its text in a config.json of that version when it was not given; such an entry is skipped.
      successor: a sentence that says what to use instead.
    """

    default: str
    successor: str


REMOVED_FLAGS: dict[str, RemovedFlag] = {
    "balance_pictures": RemovedFlag("false", "a rank computes the pictures of its own rows"),
    "clock": RemovedFlag(
        "wall", "`funrl replay` repeats an asynchronous run from its log; without --staleness two runs are the same"
    ),
    "keep_cache": RemovedFlag("false", "running sequences compute their keys and values again under new weights"),
    "overwrite": RemovedFlag("false", "give another --run_dir, or remove what a start without a step has left"),
    "latex": RemovedFlag("false", "funrl explain prints the composition, with the formulas of docstrings, as text"),
}
REMOVED_COMMANDS: dict[str, str] = {  # of `funrl`
    "bisect": "`funrl replay RUN OTHER_RUN` compares two runs, and the log of a run names the token of a gap",
    "compare": "`funrl replay RUN OTHER_RUN` lists flags that differ, `tensorboard --logdir=RUNS` draws the curves",
    "join": 'generators on a Ray cluster come and go: --place="train:dp2 generate:ray1-8"',
    "watch": "`funrl report RUN` writes the page during a run, `tensorboard --logdir=RUN` follows its curves",
}
EXAMPLE = "docs/example_environments.md trains it with examples/env_{}.py"
# By flag: values that it no longer takes; one that ends with a colon stands for all that begin so.
REMOVED_VALUES: dict[str, dict[str, str]] = {
    "report_to": dict.fromkeys(("trackio", "swanlab"), "use wandb or mlflow, or read metrics.jsonl of the run"),
    "task": {name: EXAMPLE.format(name) for name in ("retry", "programs", "search", "guessing")},
    "env": {
        "textarena:": "use --env=examples/env_textarena.py:textarena_game --env_args=name:GAME",
        "reasoning_gym:": "use --env=examples/env_reasoning_gym.py:reasoning_task --env_args=name:TASK",
        "trl:": "use --env=examples/env_trl.py:trl_environment --env_args=name:FILE.py:NAME",
        "skyrl:": "use --env=examples/env_skyrl.py:skyrl_environment --env_args=name:NAME",
        "verl:": "use --env=examples/env_verl.py:verl_environment --env_args=name:TOOLS.yaml",
        "tinker:": "use --env=examples/env_tinker.py:tinker_environment --env_args=name:FILE.py:NAME",
        "nemo_gym:": "use --env=examples/env_nemo_gym.py:nemo_gym --env_args=url:URL",
        "funrl.environments.builtin.retry:": "use --env=examples/env_retry.py:retry",
        "funrl.environments.builtin.programs:": "use --env=examples/env_programs.py:programs",
        "funrl.environments.builtin.search:": "use --env=examples/env_search.py:search_documents",
        "funrl.environments.builtin.guessing:": "use --env=examples/env_guessing.py:guess_the_number",
    },
}


def successor_of_value(flag: str, text: str) -> str:
    """Sentence that names the successor of a value that a flag took in an earlier version; "" if it never took it."""
    values = REMOVED_VALUES.get(flag, {})
    return values.get(text, "") or values.get(f"{text.partition(':')[0]}:", "")
