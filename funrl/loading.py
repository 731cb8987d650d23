"""Functions that a command line names: a user's reward or algorithm, in a file or in a package."""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

_OF_FILE = "funrl_file_"  # begins the names of modules of files that flags name


class LoadError(ValueError):
    """A function that cannot be loaded; the message names the flag, its value and what is wrong."""


def parts_by_source(flag: str, text: str, what: str) -> dict[str, str]:
    """Source of prompts -> part, of a flag's text such as "DIR@math,DIR@chat"; {}: it is no such list.

    Args:
      what: name of a part, in errors.

    Raises:
      LoadError: a part has no source, or two have the same.
    """
    words = [word.strip().rpartition("@") for word in text.split(",")]
    if not any(sign and "/" not in source for _, sign, source in words):  # else "@" is of a path
        return {}
    parts = {source: part for part, _, source in words}
    if len(parts) < len(words) or not all(part and source for part, _, source in words):
        raise LoadError(f"--{flag}={text}: write {what}@SOURCE,{what}@SOURCE with each source of the prompts once")
    return parts


def shared_folder_of_files() -> Path | None:
    """The folder with funrl's recipes/, examples/ and docs/: of a checkout, or of an installed package."""
    candidates = Path(__file__).parents[1], Path(sysconfig.get_path("data"), "share", "funrl")
    return next((path for path in candidates if (path / "recipes").is_dir() and (path / "docs").is_dir()), None)


def existing_path(text: str) -> str:
    """A path as it is given, or within funrl's own folder where only that has it, as of examples/NAME.py."""
    folder = shared_folder_of_files()
    if folder is None or os.path.isabs(text) or os.path.exists(text) or not (folder / text).exists():
        return text
    return str(folder / text)


def load_function(flag: str, text: str) -> Callable[..., Any]:
    """The function that "FILE.py:function" or "package.module:function" names; see `load_object`.

    Raises:
      LoadError: as `load_object`; or it cannot be called.
    """
    loaded = load_object(flag, text)
    if not callable(loaded):
        name = text.rpartition(":")[2]
        raise LoadError(f"--{flag}={text}: {name!r} is {loaded!r}, which cannot be called; a function is needed")
    return loaded


def load_object(flag: str, text: str) -> Any:
    """The function or other object that "FILE.py:name" or "package.module:name" names.

    A file is run as a module of its own, with its folder on the import path, as Python does with a script. As Python
    does with a module, it is run once in a process, however many of its functions are asked for. A module is looked up
    in the working directory too, after the import path.

    Args:
      flag: the name of the flag, for the message of an error.
      text: the value of the flag.

    Raises:
      LoadError: the file is missing or does not import, or has no such name.
    """
    name, function = locate(flag, text)
    path = Path(name)
    try:
        module = _from_file(path) if name.endswith(".py") else _from_name(name)
    except (Exception, SystemExit) as error:
        raise LoadError(f"--{flag}={text}: {name} does not import: {_where(error)}") from error
    if not hasattr(module, function):
        there = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
        raise LoadError(f"--{flag}={text}: {name} has no {function!r}; its functions: {', '.join(there) or 'none'}")
    return getattr(module, function)


def locate(flag: str, text: str) -> tuple[str, str]:
    """The file or module and the function that "FILE.py:function" or "package.module:function" names; nothing is run.

    Args: as in `load_function`.

    Raises:
      LoadError: the text is not of this form, or the file is missing, or has no such name in its text.
    """
    name, colon, function = text.rpartition(":")
    if not (name and colon and function):
        raise LoadError(f"--{flag}={text}: write FILE.py:function or module:function, such as {flag}.py:{flag}")
    name = existing_path(name) if name.endswith(".py") else name
    path = Path(name)
    if name.endswith(".py") and not path.is_file():
        problem = "this is a directory, a file is needed" if path.is_dir() else "no such file"
        raise LoadError(f"--{flag}={text}: {path}: {problem}")
    there = written_names(path) if name.endswith(".py") else None
    if there is not None and function not in there:
        near = difflib.get_close_matches(function, there, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        names = ", ".join(each for each in there if there[each] and not each.startswith("_")) or "none"
        raise LoadError(f"--{flag}={text}: {name} has no {function!r}; {hint}its functions: {names}")
    return name, function


def _from_name(name: str) -> ModuleType:
    """A module by its name, of the import path or else of the working directory."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)  # it stays: what the module imports later is looked up as it is
        importlib.invalidate_caches()
    return importlib.import_module(name)


def written_names(path: Path) -> dict[str, bool] | None:
    """Names that the text of a Python file defines at its top level, with True for functions and classes.

    None where only running the file can tell.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    names = dict[str, bool]()
    nodes = list[ast.AST](tree.body)
    while nodes:
        node = nodes.pop(0)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names[node.name] = True
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.setdefault(node.id, False)
        elif isinstance(node, ast.Name) and node.id in ("globals", "exec", "setattr", "vars"):
            return None
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = (
                dict.fromkeys(((member.asname or member.name).partition(".")[0] for member in node.names), False)
                | names
            )
        nodes += ast.iter_child_nodes(node)
    return None if {"*", "__getattr__"} & set(names) else names


def loaded_files() -> list[str]:
    """Files that functions were loaded from in this process, for `load_files` in another one that has them."""
    return [str(module.__file__) for name, module in sys.modules.items() if name.startswith(_OF_FILE)]


def load_files(paths: Sequence[str]) -> None:
    """Load files, so that pickled functions of theirs are found. Raises: what a file raises; OSError, it is missing."""
    for path in paths:
        _from_file(Path(path))


def _from_file(path: Path) -> ModuleType:
    path = path.resolve()
    # A name of its own: a file called json.py must not become json, nor one r.py another.
    name = f"{_OF_FILE}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def user_frames(error: BaseException) -> TracebackType | None:
    """The traceback of an error from the first frame on that is not funrl's; None: all are."""
    frames = error.__traceback__
    while frames is not None and Path(frames.tb_frame.f_code.co_filename).is_relative_to(Path(__file__).parent):
        frames = frames.tb_next
    return frames


def user_trace(error: BaseException) -> str:
    """The text of `user_frames`, and the error; the error alone where all frames are funrl's."""
    frames = user_frames(error)
    if frames is None:
        return "".join(traceback.format_exception_only(error))
    return "".join(traceback.format_exception(type(error), error, frames))


def _where(error: BaseException) -> str:
    """An error of an import with the file and the line where it arose."""
    if isinstance(error, SyntaxError):
        message = error.msg
        file = error.filename
        line = error.lineno
    else:
        last = traceback.extract_tb(error.__traceback__)[-1]
        message = str(error)
        file = last.filename
        line = last.lineno
    return f'{type(error).__name__}: {message} ("{file}", line {line})'
