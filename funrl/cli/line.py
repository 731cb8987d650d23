"""A command line with the flags of the file that it names."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from funrl.flags import parser as flags
from funrl.flags.config_file import ConfigFile, read_config
from funrl.processes.processor import processor_name
from funrl.track.records.run_directory import versions
from funrl.trainer.settings.declaration import SettingsError


class Line(NamedTuple):
    """A command line.

    Attributes:
      argv: the program's name and its arguments, those of a file first.
      config: the file; None: there is none.
      own: names that are given beside the file.
      notes: what to say of it, a line each.
    """

    argv: tuple[str, ...]
    config: ConfigFile | None
    own: frozenset[str]
    notes: tuple[str, ...]

    @property
    def recorded(self) -> frozenset[str]:
        """Names of flags whose values a run has recorded and nobody has given."""
        known = self.config.values if self.config is not None and self.config.recorded else ()
        return frozenset(known) - self.own

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Name the file in an error about one of its flags."""
        try:
            yield
        except ValueError as error:
            found = re.match(r"--(\w+)", str(error))
            if self.config is None or found is None or found[1] in self.own or found[1] not in self.config.values:
                raise
            raise SettingsError(f"{self.config.path}: {error}") from error


def read_line(name: str, argv: Sequence[str]) -> Line:
    """Put the flags of the file that --config names before those that are given beside it.

    Args:
      name: of the experiment.
      argv: the program's name and its arguments.

    Raises:
      SettingsError: a flag is given twice, or the file cannot be read, or is of another experiment.
    """
    flags.refuse_repeated(argv)
    found = flags.read([flags.CONFIG], argv)
    own = frozenset(flags.flag_name(text).removeprefix("no") for text in found.unknown) | {
        flags.flag_name(text) for text in found.unknown
    }
    if found.values["config"] is None:
        return Line(tuple(argv), None, own, ())
    config = read_config(found.values["config"])
    if config.experiment not in (None, name) and not (name == "rl" and "algorithm" in config.values):
        raise SettingsError(
            f"--config={config.path}: this is of {config.experiment}; `funrl {config.experiment} "
            f"--config={config.path}` takes it"
        )
    return Line((argv[0], *config.flags(), *argv[1:]), config, own, tuple(_changed(config)))


def _changed(config: ConfigFile) -> Iterator[str]:
    """Remarks on what is not as it was when a run was made."""
    now = versions() | {"processor": processor_name()}
    for package, before in config.versions.items():
        if before is not None and now.get(package) not in (None, before):
            yield f"{config.path}: made with {package} {before}; this is {now[package]}, so numbers may differ"
