"""The command `funrl compile`: the steps of a run, compiled for TPUs that are not here.

    funrl compile grpo --model=CONFIG.json --mesh=dp4,tp4 --target=v5e:4x4

Nothing is trained; of the model only config.json is read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from funrl.cli.command import read_command, with_models
from funrl.cli.doctor import experiment_of
from funrl.cli.line import program_words
from funrl.cli.usages import COMMANDS
from funrl.flags import parser as flags
from funrl.trainer.settings.declaration import Flag, refusing

TARGET = Flag("target", None, str, optional=True, text="chips to compile for, such as v5e:2x2")


def compile_command(argv: Sequence[str]) -> int:
    """Print what the steps take of a chip; return 0.

    Args:
      argv: "compile", then an experiment or recipe with its flags and --target.

    Raises:
      SettingsError: there is no experiment, no target, or jax is not installed.
    """
    flags.refuse_repeated(argv)
    line = flags.read([TARGET], argv)
    target = line.values["target"]
    words = program_words(line.unknown if target else (), COMMANDS["compile"].usage)
    if "--dry_run" not in words:
        words.append("--dry_run")  # the report has its estimate, and takes its flags
    command = with_models(read_command(experiment_of(words[0]), [f"funrl {words[0]}", *words[1:]], writes=False))
    with refusing("funrl compile needs jax: pip install 'funrl[xla]' libtpu: ", ImportError):
        from funrl.cost.ahead.report import compile_report
        from funrl.xla.errors import XlaError
    with refusing(f"--target={target}: ", XlaError):
        print(compile_report(command.settings, command.compose, target, lambda line: print(line, file=sys.stderr)))
    return 0
