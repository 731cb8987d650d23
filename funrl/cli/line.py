"""The reader of command lines: of runs, including the flags of a --config file, and of other commands."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from funrl.flags import parser as flags
from funrl.flags.config_file import ConfigFile, read_config
from funrl.flags.foreign.answers import check_names, names_given
from funrl.flags.foreign.meaning import NameContext
from funrl.processes.processor import processor_name
from funrl.track.records.run_directory import versions
from funrl.trainer.settings.declaration import Flag, SettingsError
from funrl.trainer.settings.settings import settings_flags


class Line(NamedTuple):
    """A command line.

    Attributes:
      argv: the program's name and its arguments, those of the file first.
      config: the file; None: no file.
      own: names of the flags given next to the file.
      notes: lines to print about it.
    """

    argv: tuple[str, ...]
    config: ConfigFile | None
    own: frozenset[str]
    notes: tuple[str, ...]

    @property
    def recorded(self) -> frozenset[str]:
        """Names of flags whose values come only from a run's config.json."""
        known = self.config.values if self.config is not None and self.config.recorded else ()
        return frozenset(known) - self.own

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Context that adds the file's name to an error about one of its flags."""
        try:
            yield
        except ValueError as error:
            flag = re.match(r"--(\w+)", str(error))
            if self.config is None or flag is None or flag[1] in self.own or flag[1] not in self.config.values:
                raise
            raise SettingsError(f"{self.config.path}: {error}") from error


def read_line(name: str, argv: Sequence[str]) -> Line:
    """Put the flags of the --config file before those of the command line.

    Args:
      name: name of the experiment.
      argv: the program's name and its arguments.

    Raises:
      SettingsError: a flag is given twice, or the file cannot be read or is for another experiment.
    """
    flags.refuse_repeated(argv)
    given = {flags.flag_name(text) for text in argv[1:] if text.startswith("-")}
    own = frozenset(given | {name.removeprefix("no") for name in given})
    config = given_config(argv)
    if config is None:
        return Line(tuple(argv), None, own, ())
    if config.experiment not in (None, name) and not (name == "rl" and "algorithm" in config.values):
        raise SettingsError(
            f"--config={config.path} is for {config.experiment}; use `funrl {config.experiment} --config={config.path}`"
        )
    return Line((argv[0], *config.flags(), *argv[1:]), config, own, tuple(_changed(config)))


def given_config(argv: Sequence[str]) -> ConfigFile | None:
    """The file that --config names. Raises: SettingsError."""
    path = flags.read([flags.CONFIG], argv).values["config"]
    return None if path is None else read_config(path)


def read_words(
    own: Sequence[Flag], argv: Sequence[str], usage: str, least: int = 1, most: int | None = 1
) -> tuple[tuple[str, ...], flags.Read]:
    """Read the command line of a command with directories, files or texts, and its own flags.

    Args:
      own: all flags that it takes.
      argv: the program's name and its arguments; words after "--" are not flags.
      usage: the usage line.
      least, most: bounds of the number of words; None: any number.

    Returns: the words, and the flags.

    Raises:
      SettingsError: wrong number of words, an unknown flag, or as `flags.read`.
    """
    flags.refuse_repeated(argv)
    end = argv.index("--") if "--" in argv else len(argv)
    line = flags.read(own, argv[:end])
    known = {flag.name: flag for flag in own}
    defaults = {flag.name: flag.default for flag in settings_flags().values()}
    check_names(names_given(line.unknown), known, NameContext({}, defaults, frozenset(), argv[0]))
    flags.refuse_unknown(line.unknown_flags, known, hint=f"usage: {usage}")
    words = (*line.words, *argv[end + 1 :])
    if len(words) < least or (most is not None and len(words) > most):
        problem = f"{words[most]!r} is not a flag; " if most is not None and len(words) > most else ""
        raise SettingsError(f"{problem}usage: {usage}")
    return words, line


def program_words(words: Sequence[str], usage: str) -> list[str]:
    """The command line of a run inside that of a command. Raises: SettingsError, it names no program."""
    if not words or words[0].startswith("-"):
        raise SettingsError(f"usage: {usage}")
    return list(words)


def _changed(config: ConfigFile) -> Iterator[str]:
    """Remarks on package versions that have changed since a run was made."""
    now = versions() | {"processor": processor_name()}
    for package, before in config.versions.items():
        if before is not None and now.get(package) not in (None, before):
            yield f"{config.path}: made with {package} {before}; this is {now[package]}, so numbers may differ"
