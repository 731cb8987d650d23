"""Files of flags: handwritten YAML, JSON or Python, and the config.json of a run, which repeats the run.

A key is the name of a flag, of `Settings` or of the recipe; `experiment` names the program. Values are parsed like
those of a command line, with the same bounds, types and hints.
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
from funrl.trainer.settings.successors import REMOVED_FLAGS

# Bounds of a YAML file; values are counted with aliases expanded.
MOST_CHARACTERS = 1 << 20
MOST_VALUES = 100_000
CONFIG_FILES = "a .yaml, .json or .py file, or the config.json of a run"


class ConfigFile(NamedTuple):
    """A file of flags.

    Attributes:
      path: path as given.
      values: text of each flag, as after the equals sign on a command line.
      experiment: program that the file is for; None: any.
      recorded: whether a run has written it. It then has every flag, including flags without effect in the run.
      versions: versions of the run's packages, and the processor.
    """

    path: str
    values: Mapping[str, str]
    experiment: str | None
    recorded: bool
    versions: Mapping[str, Any]

    def flags(self) -> list[str]:
        """The equivalent command line."""
        return [f"--{name}={text}" for name, text in self.values.items()]


def read_config(path: str) -> ConfigFile:
    """Read a file of flags. A Python file is run: its dict `config`, or else its public names, are the flags.

    Raises:
      SettingsError: it cannot be read, or an entry cannot be a flag.
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
        content = {name: value for name, value in content.items() if not had_no_effect(name, value)}
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
    """The content of a file of any kind."""
    file = Path(existing_path(path))
    if not file.is_file():
        problem = "this is a directory, not a file" if file.is_dir() else "no such file"
        raise SettingsError(f"--config={path}: {problem}; give {CONFIG_FILES}")
    try:
        if file.suffix == ".py":
            content = _names(runpy.run_path(str(file)))
        else:
            text = file.read_text(encoding="utf-8")
            content = json.loads(text) if file.suffix == ".json" else load_yaml(text, _Texts)
    except (Exception, SystemExit) as error:  # a Python file may raise anything
        known = isinstance(error, (OSError, ValueError, yaml.YAMLError))
        kind = "" if known else f"{type(error).__name__}: "
        raise SettingsError(f"--config={path}: {kind}{' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not content:
        raise SettingsError(f"--config={path}: flag names with values are needed, not {content!r:.60}")
    return dict(content)


def load_yaml(text: str, loader: type[yaml.BaseLoader]) -> Any:
    """The content of a YAML file of bounded size: nine levels of aliases can expand to a billion values.

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
            raise ValueError(f"it has {values} values with aliases expanded; at most {MOST_VALUES} are read")
        return reader.construct_document(node)
    except RecursionError:
        raise ValueError("its entries are nested too deeply") from None
    finally:
        reader.dispose()


def _values(node: yaml.Node, counted: dict[int, int | None]) -> int:
    """Values below a node, itself included.

    Args:
      counted: counts by ids of nodes; None for ancestors of this node.

    Raises:
      ValueError: an alias refers to a node that contains it.
    """
    if id(node) not in counted:
        counted[id(node)] = None
        below = node.value if isinstance(node, yaml.CollectionNode) else ()
        if isinstance(node, yaml.MappingNode):
            below = [child for pair in node.value for child in pair]
        counted[id(node)] = 1 + sum(_values(child, counted) for child in below)
    count = counted[id(node)]
    if count is None:
        raise ValueError("an alias refers to an entry that contains it")
    return count


def _names(module: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that a Python file gives."""
    if isinstance(module.get("config"), dict):
        return dict(module["config"])
    public = {name: value for name, value in module.items() if not name.startswith("_")}
    return {name: x for name, x in public.items() if not (isinstance(x, (ModuleType, type)) or callable(x))}


def flag_text(value: Any) -> str:
    """A value as text of a command line."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ",".join(flag_text(item) for item in value)
    return str(value)


class _Texts(yaml.BaseLoader):
    """YAML loader that keeps values as written: plain YAML reads 1e-5 as text and `on` as true."""


def _one_of_each(loader: _Texts, node: yaml.MappingNode) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node)
        if key in entries:
            raise ValueError(f"{key!r} occurs twice")
        entries[key] = loader.construct_object(value_node, deep=True)
    return entries


def _scalar(loader: _Texts, node: yaml.ScalarNode) -> str | None:
    return None if node.style is None and node.value in ("", "~", "null") else loader.construct_scalar(node)


_Texts.add_constructor("tag:yaml.org,2002:map", _one_of_each)
_Texts.add_constructor("tag:yaml.org,2002:str", _scalar)


def had_no_effect(name: str, value: Any) -> bool:
    """True for a flag of an earlier version that a run has recorded with its default."""
    return name in REMOVED_FLAGS and flag_text(value) == REMOVED_FLAGS[name].default
