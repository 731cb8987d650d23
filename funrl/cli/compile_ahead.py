"""The command `funrl compile`: the steps of a run, compiled for TPUs that are not here.

    funrl compile grpo --model=CONFIG.json --mesh=dp4,tp4 --target=v5e:4x4

Nothing is trained; of the model only config.json is read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from funrl.cli.command import read_command, with_models
from funrl.cli.doctor import experiment_of
from funrl.trainer.settings.declaration import SettingsError

TARGET = "--target="


def compile_command(argv: Sequence[str]) -> int:
    """Print what the steps take of a chip; return 0.

    Args:
      argv: "compile", then an experiment or recipe with its flags and --target.

    Raises:
      SettingsError: there is no experiment, no target, or jax is not installed.
    """
    words = [word for word in argv[1:] if not word.startswith(TARGET)]
    targets = [word.removeprefix(TARGET) for word in argv[1:] if word.startswith(TARGET)]
    if not words or words[0].startswith("-"):
        raise SettingsError("funrl compile needs an experiment, such as funrl compile grpo --target=v5e:2x2")
    if len(targets) != 1:
        raise SettingsError("funrl compile needs one --target, such as --target=v5e:2x2")
    if "--dry_run" not in words:
        words.append("--dry_run")  # the report has its estimate, and takes its flags
    command = with_models(read_command(experiment_of(words[0]), [f"funrl {words[0]}", *words[1:]], writes=False))
    try:
        from funrl.cost.ahead.report import compile_report
        from funrl.xla.errors import XlaError
    except ImportError as error:
        raise SettingsError(f"funrl compile needs jax: pip install 'funrl[xla]' libtpu ({error})") from error
    try:
        print(compile_report(command.settings, command.compose, targets[0], lambda line: print(line, file=sys.stderr)))
    except XlaError as error:
        raise SettingsError(f"--target={targets[0]}: {error}") from error
    return 0
