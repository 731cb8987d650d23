"""The house: which package of funrl imports which, read from the source, as a picture and as rules.

    python tools/house.py

writes the picture and the table of docs/design.md anew and prints what breaks the rules. `tests/test_house.py` fails
where the page has drifted or a rule is broken.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "design.md"
BEGIN, END = "<!-- house: written by tools/house.py -->", "<!-- end of the house -->"

# From the ground up: a package imports only from packages above it in this list.
ORDER = (
    "trees",
    "autograd",
    "across",
    "kinds",
    "role_kinds",
    "fields",
    "batch",
    "seeds",
    "loading",
    "processes",
    "mesh",
    "compiled_kernels",
    "models",
    "optim",
    "algos",
    "asynchrony",
    "xla",
    "rollout",
    "rewards",
    "data",
    "environments",
    "serve",
    "foreign",
    "tasks",
    "trainer",
    "testing",
    "cost",
    "track",
    "flags",
    "api",
    "cli",
    "experiments",
    "__main__",
)
# The same inside a package that has packages: OWN stands for its own files.
OWN = ""
INSIDE = {
    "mesh": (OWN, "pools"),
    "models": (
        OWN,
        "compiling",
        "decoder",
        "vision",
        "huggingface",
        "huggingface/configs",
        "huggingface/vision_configs",
    ),
    "rollout": (OWN, "native/device", "native", "vllm", "remote", "ray"),
    "rewards": ("mathematics", OWN),
    "environments": ("forms", OWN, "hosting", "builtin"),
    "trainer": (
        "settings",
        "steps",
        "lowered",
        "storage",
        "sources",
        "partial_rollouts",
        "jobs",
        "checkpoints",
        OWN,
        "placement",
    ),
    "cost": ("tracing", OWN, "ahead"),
    "track": ("records", "report", OWN),
    "flags": (OWN, "foreign"),
}
# Packages that may import less than their place allows: an algorithm knows no device.
NARROW = {
    "algos": ("trees", "across", "kinds", "role_kinds", "fields", "batch", "seeds", "algos"),
}
# Arrows upwards that are meant: (module, what it imports by name when it runs) -> why.
UPWARDS = {
    ("funrl.api.warm_start", "funrl.experiments.sft"): "runs as a process of its own",
    ("funrl.cli.command", "funrl.experiments"): "the command line runs programs by name",
    ("funrl.cli.main", "funrl.experiments"): "the command line runs programs by name",
}
# Only these may import torch.distributed. The dry run makes its fake process group in cost/tracing/estimate.py.
DISTRIBUTED = ("mesh", "processes", "cost/tracing/estimate.py")
# Public names that two modules may define, as they are the field's word in both and are read with their module's name.
SHARED_DEFINITIONS = {
    **dict.fromkeys(("chain", "scale", "stateless"), ("algos.core", "optim")),
    "check_algorithm": ("testing.check_pieces", "trainer.jobs.compatibility"),
    "load": ("api.python", "models.huggingface.directories", "trainer.checkpoints.checkpoint"),
    "main": ("cli", "processes.workers", "rewards.confine", "trainer.storage.shard_server"),
    "linear": ("compiled_kernels.linear", "optim"),
    "log": ("compiled_kernels", "models", "rollout"),
    "Message": ("mesh.buckets", "rollout.episodes"),  # between ranks, and of a chat
    "LARGEST": ("rewards.call", "trainer.settings.checks"),  # once of torch and once where torch is not imported
}


MODULE_TEXT = re.compile(r"^(?:python -m )?(funrl(?:\.\w+)+)\.?(?::\w*)?$")


class Import(NamedTuple):
    """One import of a module of funrl by another one."""

    importer: str
    line: int
    imported: str


class House(NamedTuple):
    """The modules of funrl.

    Attributes:
      root: the directory that holds the package.
      files: of each module, its file.
      indexes: of each lazy `__init__`, the module that each of its names comes from.
    """

    root: Path
    files: Mapping[str, Path]
    indexes: Mapping[str, Mapping[str, str]]


class Source(NamedTuple):
    """The parts of a file that the rules ask for.

    Attributes:
      imports: its imports, those inside functions too.
      texts: line and module of each string such as "funrl.cli.main:main", by which a module is imported or run.
      defined: names that it defines at its top level.
      docstrings: the first lines of its docstrings.
    """

    imports: tuple[ast.Import | ast.ImportFrom, ...]
    texts: tuple[tuple[int, str], ...]
    defined: tuple[str, ...]
    docstrings: tuple[str, ...]


def read_source(file: Path) -> Source:
    """Parse a file; an equal text is parsed once."""
    return _source(file.read_text())


@functools.cache
def _source(text: str) -> Source:
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    documented = (node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
    constants = (node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    texts = ((node.lineno, MODULE_TEXT.search(str(node.value))) for node in constants)
    return Source(
        imports=tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)),
        texts=tuple((line, match[1]) for line, match in texts if match),
        defined=tuple(_defined(tree)),
        docstrings=tuple((ast.get_docstring(node) or "").partition("\n")[0] for node in documented),
    )


def read_house(root: Path = ROOT) -> House:
    """Find the modules of a checkout."""
    files = {}
    for file in sorted((root / "funrl").rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return House(root, files, {name: index(file) for name, file in files.items() if file.name == "__init__.py"})


def index(file: Path) -> dict[str, str]:
    """Names that a lazy `__init__` gives, and the modules that they come from: its imports for type checkers."""
    blocks = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.If)]
    found = {}
    for node in (node for block in blocks if ast.unparse(block.test) == "TYPE_CHECKING" for node in block.body):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.asname or alias.name: node.module for alias in node.names}
    return found


def imports(house: House) -> list[Import]:
    """Imports between modules but those of `UPWARDS`: inside functions, for type checkers and by name in a string too.

    The index of a package is looked through: `from funrl.models import place` imports funrl.models.placed. An import
    of `funrl` itself, for its version or its folder, is none: it runs no other module.
    """
    return [one for one in _all_imports(house) if (one.importer, one.imported) not in UPWARDS]


def absent_arrows(house: House) -> list[str]:
    """Entries of `UPWARDS` that no module has."""
    there = {(one.importer, one.imported) for one in _all_imports(house)}
    return [f"{a} does not import {b}, as UPWARDS says" for a, b in UPWARDS if a in house.files and (a, b) not in there]


def _all_imports(house: House) -> list[Import]:
    found = []
    for name, file in house.files.items():
        hidden = set(house.indexes.get(name, {}).values())
        for line, imported in _named(house, read_source(file)):
            if imported not in (name, "funrl") and imported not in hidden:
                found.append(Import(name, line, imported))
    return sorted(set(found))


def _named(house: House, source: Source) -> Iterator[tuple[int, str]]:
    """Line and module of each import of funrl in a file."""
    for node in source.imports:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "funrl")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "funrl":
            module = str(node.module)
            given = house.indexes.get(module, {})
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                yield node.lineno, inner if inner in house.files else given.get(alias.name, module)
    yield from ((line, module) for line, module in source.texts if module in house.files)


def package(module: str) -> str:
    """The package that a module of funrl is in: "" for the index of funrl itself."""
    return module.split(".")[1] if "." in module else ""


def inner_package(module: str) -> str:
    """The package inside a package that a module is in; OWN where it is one of the outer package's own files."""
    parts = module.split(".")[2:]
    inside = INSIDE.get(package(module), ())
    return parts[0] if parts and parts[0] in inside else OWN


def arrows(house: House) -> dict[str, tuple[str, ...]]:
    """Of each package, the packages that it imports, both from the ground up."""
    found = {(package(one.importer), package(one.imported)) for one in imports(house)}
    return {a: tuple(b for b in ORDER if (a, b) in found and a != b) for a in ORDER}


def problems(house: House) -> list[str]:
    """List breaches of the rules, each with its file and line; [] where there is none."""
    known = {package(name) for name in house.files} - {""}
    found = [f"funrl/{name}: not in the order of tools/house.py" for name in sorted(known - set(ORDER))]
    found += [f"{name}: in the order of tools/house.py, but not in funrl/" for name in ORDER if name not in known]
    for one in imports(house):
        importer, imported = package(one.importer), package(one.imported)
        where = f"{house.files[one.importer].relative_to(house.root)}:{one.line} imports {one.imported}"
        if importer not in ORDER or imported not in ORDER:
            continue
        if ORDER.index(imported) > ORDER.index(importer):
            found.append(f"{where}: {imported} comes after {importer}")
        elif importer in NARROW and not _within(one.imported, NARROW[importer]):
            found.append(f"{where}: {importer} may import only {', '.join(NARROW[importer])}")
        elif imported == importer and importer in INSIDE:
            order = INSIDE[importer]
            inner, other = inner_package(one.importer), inner_package(one.imported)
            if order.index(other) > order.index(inner):
                after = f"{importer}.{other}" if other else f"{importer}'s own files"
                found.append(f"{where}: {after} comes after {importer}.{inner}")
    found += [f"circle: {' -> '.join(sorted(one))}" for one in circles(house)]
    return found + absent_arrows(house) + unordered(house) + shared_definitions(house) + distributed(house)


def _within(module: str, allowed: tuple[str, ...]) -> bool:
    return any(f"{module}.".startswith(f"funrl.{name}.") for name in allowed)


def circles(house: House) -> list[frozenset[str]]:
    """Sets of modules that import one another, directly or through others."""
    direct: dict[str, set[str]] = {name: set() for name in house.files}
    for one in imports(house):
        direct[one.importer].add(one.imported)
    reached = {name: _reached(name, direct) for name in direct}
    found = {frozenset(b for b in reached[a] if a in reached[b]) for a in direct if a in reached[a]}
    return sorted(found, key=sorted)


def _reached(start: str, direct: Mapping[str, set[str]]) -> set[str]:
    found, ahead = set[str](), [start]
    while ahead:
        new = direct.get(ahead.pop(), set()) - found
        found |= new
        ahead += new
    return found


def unordered(house: House) -> list[str]:
    """Folders that INSIDE does not order."""
    problems = []
    for file in house.files.values():
        folder = file.parent.relative_to(house.root / "funrl").as_posix()
        outer, _, inner = folder.partition("/")
        if file.name == "__init__.py" and inner and outer in INSIDE and inner not in INSIDE[outer]:
            problems.append(f"funrl/{folder}: not in the order of tools/house.py")
    return problems


def shared_definitions(house: House) -> list[str]:
    """Public functions, classes and constants that several modules define under one name."""
    places: dict[str, list[str]] = {}
    for module, file in house.files.items():
        if file.name != "__init__.py":
            for name in sorted({name for name in read_source(file).defined if not name.startswith("_")}):
                places.setdefault(name, []).append(module.removeprefix("funrl."))
    return [
        f"{name}: defined in each of {', '.join(modules)}"
        for name, modules in sorted(places.items())
        if len(modules) > 1 and not all(_within(f"funrl.{one}", SHARED_DEFINITIONS.get(name, ())) for one in modules)
    ]


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def distributed(house: House) -> list[str]:
    """Imports of torch.distributed from outside the mesh."""
    found = []
    for file in house.files.values():
        place = file.relative_to(house.root / "funrl")
        if place.parts[0] in DISTRIBUTED or place.as_posix() in DISTRIBUTED:
            continue
        for node in read_source(file).imports:
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            if any(f"{module}{alias.name}.".startswith("torch.distributed.") for alias in node.names):
                found.append(f"funrl/{place}:{node.lineno} imports torch.distributed, for mesh/ and processes/ only")
    return found


def picture(house: House) -> str:
    """The packages as a Mermaid graph and a table.

    An arrow goes from what imports to what is imported; one that follows from others is left out of the graph.
    """
    direct = arrows(house)
    reached = {name: _reached(name, {a: set(b) for a, b in direct.items()}) for name in ORDER}
    lines = ["```mermaid", "graph TD"]
    for name in reversed(ORDER):
        needed = [b for b in direct[name] if not any(b in reached[other] for other in direct[name])]
        lines += [f"  {name} --> {b}" for b in reversed(needed)] or [f"  {name}"]
    rows = [f"| `{name}` | {', '.join(direct[name]) or 'nothing'} |" for name in reversed(ORDER)]
    return "\n".join([*lines, "```", "", "| package | imports |", "|---|---|", *rows])


def drawn(text: str, house: House) -> str:
    """A page with the house between its marks.

    Raises:
      ValueError: it has no marks.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{picture(house)}\n\n{END}{after}"


def main() -> int:
    house = read_house()
    PAGE.write_text(drawn(PAGE.read_text(), house))
    found = problems(house)
    print("\n".join(found) if found else f"{PAGE.relative_to(ROOT)} is written; no rule is broken")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
