"""Files of flags: YAML, JSON or Python by hand, and the config.json of a run, which repeats it.

A key is the name of a flag, of `Settings` or of the recipe; `experiment` names the program. Values are read as the
command line reads them, so that bounds, types and hints are those of the flags.
"""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import yaml

from funrl.loading import existing_path
from funrl.trainer.settings.declaration import NONE, START_FLAGS, SettingsError

# Bounds of a YAML file; values are counted with its aliases written out.
MOST_CHARACTERS = 1 << 20
MOST_VALUES = 100_000
CONFIG_FILES = "a .yaml, .json or .py file, or the config.json of a run"


class ConfigFile(NamedTuple):
    """A file of flags.

    Attributes:
      path: as it was given.
      values: text of each flag, as a command line has it after the equals sign.
      experiment: the program that it is for; None: any.
      recorded: whether a run has written it. Then it has every flag, those without a meaning in the run included.
      versions: of the packages that the run had, and the processor.
    """

    path: str
    values: Mapping[str, str]
    experiment: str | None
    recorded: bool
    versions: Mapping[str, Any]

    def flags(self) -> list[str]:
        """The command line that it stands for."""
        return [f"--{name}={text}" for name, text in self.values.items()]


def read_config(path: str) -> ConfigFile:
    """Read a file of flags. A Python file is run: its dict `config`, or else its public names, are the flags.

    Raises:
      SettingsError: it cannot be read, or has something that no flag can be.
    """
    content = _mapping(path)
    experiment = content.pop("experiment", None)
    versions = {}
    recorded = isinstance(content.get("flags"), dict) and "command" in content
    if recorded:
        versions = content.get("versions") or {}
        if processor := (content.get("processor") or {}).get("name"):
            versions = versions | {"processor": processor}
        content = content["flags"]
        if given := content.get("given_in_python"):
            raise SettingsError(
                f"--config={path}: {given} of this run came from Python; only the program that made it can repeat it"
            )
        content = {name: value for name, value in content.items() if name not in START_FLAGS}
    for name, value in content.items():
        if isinstance(value, dict):
            raise SettingsError(
                f"--config={path}: {name} is a nested table; a flag file is flat; `funrl import {path}` reads a "
                "configuration of verl or TRL"
            )
        if not re.fullmatch(r"\w+", str(name)):
            raise SettingsError(f"--config={path}: {name!r} is not the name of a flag")
    texts = {str(name): flag_text(value) for name, value in content.items()}
    return ConfigFile(path, texts, None if experiment is None else str(experiment), recorded, versions)


def _mapping(path: str) -> dict[str, Any]:
    """The content of a file, whatever its kind."""
    file = Path(existing_path(path))
    if not file.is_file():
        problem = "this is a directory, a file is needed" if file.is_dir() else "no such file"
        raise SettingsError(f"--config={path}: {problem}; give {CONFIG_FILES}")
    try:
        if file.suffix == ".py":
            content = _names(runpy.run_path(str(file)))
        else:
            text = file.read_text(encoding="utf-8")
            content = json.loads(text) if file.suffix == ".json" else load_yaml(text, _Texts)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SettingsError(f"--config={path}: {' '.join(str(error).split())}") from error
    except (Exception, SystemExit) as error:  # of a Python file
        raise SettingsError(f"--config={path}: {type(error).__name__}: {error}") from error
    if not isinstance(content, dict) or not content:
        raise SettingsError(f"--config={path}: names of flags with values are needed, not {content!r:.60}")
    return dict(content)


def load_yaml(text: str, loader: type[yaml.BaseLoader]) -> Any:
    """The content of a YAML file, whose size is bounded: nine levels of aliases stand for a billion values.

    Raises:
      ValueError: it is too large.
      yaml.YAMLError: it is not YAML.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters; at most {MOST_CHARACTERS} are read")
    reader = loader(text)
    try:
        node = reader.get_single_node()
        if node is None:
            return None
        values = _values(node, {})
        if values > MOST_VALUES:
            raise ValueError(f"it has {values} values with its aliases written out; at most {MOST_VALUES} are read")
        return reader.construct_document(node)
    except RecursionError:
        raise ValueError("its entries are nested too deeply") from None
    finally:
        reader.dispose()


def _values(node: yaml.Node, counted: dict[int, int | None]) -> int:
    """Values below a node, itself included.

    Args:
      counted: counts by the ids of nodes; None for those that this one is below.

    Raises:
      ValueError: an alias stands for something that it is itself a part of.
    """
    if id(node) not in counted:
        counted[id(node)] = None
        below = node.value if isinstance(node, yaml.CollectionNode) else ()
        if isinstance(node, yaml.MappingNode):
            below = [child for pair in node.value for child in pair]
        counted[id(node)] = 1 + sum(_values(child, counted) for child in below)
    count = counted[id(node)]
    if count is None:
        raise ValueError("an alias stands for an entry that it is a part of itself")
    return count


def _names(module: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that a Python file gives."""
    if isinstance(module.get("config"), dict):
        return dict(module["config"])
    public = {name: value for name, value in module.items() if not name.startswith("_")}
    return {name: x for name, x in public.items() if not (isinstance(x, (ModuleType, type)) or callable(x))}


def flag_text(value: Any) -> str:
    """A value as the command line writes it."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ",".join(flag_text(item) for item in value)
    return str(value)


class _Texts(yaml.BaseLoader):
    """YAML whose values stay as they are written: 1e-5 is no text elsewhere, and `on` no truth value."""


def _one_of_each(loader: _Texts, node: yaml.MappingNode) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node)
        if key in entries:
            raise ValueError(f"{key!r} is there twice")
        entries[key] = loader.construct_object(value_node, deep=True)
    return entries


def _scalar(loader: _Texts, node: yaml.ScalarNode) -> str | None:
    return None if node.style is None and node.value in ("", "~", "null") else loader.construct_scalar(node)


_Texts.add_constructor("tag:yaml.org,2002:map", _one_of_each)
_Texts.add_constructor("tag:yaml.org,2002:str", _scalar)
