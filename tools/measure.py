"""Figures of the source that say how it reads: code lines, density and parameters, by package.

    python tools/measure.py             # a table of funrl/, and code lines of other files
    python tools/measure.py --functions # also each function and statement that exceeds a bound
    python tools/measure.py --bounds    # write tools/bounds.json anew, after figures have fallen

`tests/test_house.py` fails where a package exceeds its row of tools/bounds.json, unless the figure is within `GOALS`.
`code` is its budget of lines without docstrings, comments and blanks: who adds lines takes others away, or raises the
budget in a commit of its own that says why. So it is with the subjects of that file, which lie in several packages.
"""

from __future__ import annotations

import ast
import io
import json
import math
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
BOUNDS = ROOT / "tools" / "bounds.json"
MOST_PARAMETERS = 6
# Figures that any package may have; dense and vague are per 100 functions.
GOALS = {"dense": 4, "wide": 0, "crowded": 0, "skips": 0, "vague": 0, "code": 0}
ROOM = 1.03  # of a budget of code lines, when it is written
NO_CODE = (*(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),)
PER_100_FUNCTIONS = ("dense", "vague")
# Further code: what it is -> folder and endings of its files. What moves out of funrl/*.py is counted where it lands.
ELSEWHERE = {
    "C++ of funrl": ("funrl", (".hpp", ".cpp")),
    "stubs": (".", (".pyi",)),
    "templates of funrl": ("funrl", (".html", ".jinja", ".j2", ".css", ".js")),
    **{folder: (folder, (".py",)) for folder in ("examples", "tools", "tests", "benchmarks")},
}
VAGUE = ("found", "one", "told", "made", "said", "how", "at", "g")  # locals that say nothing about what they hold


class Figures(NamedTuple):
    """Counts over some files.

    Attributes:
      dense: statements that assign several unrelated values.
      wide: functions with more than `MOST_PARAMETERS` parameters.
      crowded: calls with more than `MOST_PARAMETERS` positional arguments.
      skips: lines that the formatter may not touch.
      vague: functions with a local of `VAGUE`.
      code: lines without docstrings, comments and blanks.
    """

    files: int = 0
    lines: int = 0
    statements: int = 0
    functions: int = 0
    dense: int = 0
    wide: int = 0
    crowded: int = 0
    skips: int = 0
    vague: int = 0
    code: int = 0

    def __add__(self, other: Figures) -> Figures:  # type: ignore[override]
        return Figures(*(a + b for a, b in zip(self, other, strict=True)))


def figures_of(file: Path) -> Figures:
    """Count one file."""
    text = file.read_text()
    nodes = list(ast.walk(ast.parse(text)))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return Figures(
        files=1,
        lines=text.count("\n"),
        statements=sum(isinstance(node, ast.stmt) for node in nodes),
        functions=len(functions),
        dense=sum(is_dense(node) for node in nodes),
        wide=sum(parameters_of(node) > MOST_PARAMETERS for node in functions),
        crowded=sum(isinstance(node, ast.Call) and len(node.args) > MOST_PARAMETERS for node in nodes),
        skips=len(re.findall(r"#\s*fmt:\s*(?:skip|off)", text)),
        vague=sum(bool(vague_locals(node)) for node in functions),
        code=code_lines(text),
    )


def code_lines(text: str) -> int:
    """Lines of a file that have code: no docstrings, comments and blanks."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    documented = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds) and ast.get_docstring(node)]
    docstrings = {line for node in documented for line in _lines_of(node.body[0])}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {line for x in tokens if x.type not in NO_CODE for line in range(x.start[0], x.end[0] + 1)}
    return len(lines - docstrings)


def code_lines_elsewhere(root: Path = ROOT) -> dict[str, int]:
    """Code lines of each row of `ELSEWHERE`, of files that git tracks; other languages without comments and blanks."""
    listed = subprocess.run(["git", "ls-files"], cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout
    files = [root / line for line in listed.splitlines()]
    counts = {}
    for what, (folder, endings) in ELSEWHERE.items():
        chosen = [file for file in files if file.suffix in endings and file.is_relative_to(root / folder)]
        counts[what] = sum(map(_code_lines_of_file, chosen))
    return counts


def _code_lines_of_file(file: Path) -> int:
    text = file.read_text()
    if file.suffix in (".py", ".pyi"):
        return code_lines(text)
    uncommented = re.sub(r"/\*.*?\*/|<!--.*?-->|\{#.*?#\}", "", text, flags=re.DOTALL)
    return sum(bool(line.strip()) and not line.lstrip().startswith("//") for line in uncommented.splitlines())


def _lines_of(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def is_dense(node: ast.AST) -> bool:
    """True for `a, b = x, y`, but for a swap: each value has a name of its own, so each can have a line of its own."""
    if not isinstance(node, ast.Assign):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False
    names = {ast.unparse(name) for name in target.elts}
    values = {ast.unparse(value) for value in node.value.elts}
    return not names & values


def parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters of a function, without self and cls."""
    arguments = node.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def vague_locals(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Names of `VAGUE` that a function binds."""
    bound = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)}
    return bound & set(VAGUE)


def excesses(root: Path = ROOT) -> Iterator[str]:
    """Each place that exceeds a bound, with its file and line."""
    for file in sorted((root / "funrl").rglob("*.py")):
        place = file.relative_to(root)
        for node in ast.walk(ast.parse(file.read_text())):
            if is_dense(node):
                yield f"{place}:{getattr(node, 'lineno', 0)}: several values in one assignment"
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if (count := parameters_of(node)) > MOST_PARAMETERS:
                    yield f"{place}:{node.lineno}: {node.name} has {count} parameters"
                if names := vague_locals(node):
                    yield f"{place}:{node.lineno}: {node.name} has locals named {', '.join(sorted(names))}"
            elif isinstance(node, ast.Call) and len(node.args) > MOST_PARAMETERS:
                yield f"{place}:{node.lineno}: a call with {len(node.args)} positional arguments"


def by_package(root: Path = ROOT) -> dict[str, Figures]:
    """Figures of each folder of funrl."""
    totals: dict[str, Figures] = {}
    for file in sorted((root / "funrl").rglob("*.py")):
        folder = file.parent.relative_to(root).as_posix()
        totals[folder] = totals.get(folder, Figures()) + figures_of(file)
    return totals


def over_bounds(totals: dict[str, Figures], bounds: dict[str, dict[str, int]]) -> list[str]:
    """List figures of packages that exceed both their bound and the goal; a package without bounds has the goals."""
    problems = []
    for name, figures in totals.items():
        for field, goal in GOALS.items():
            figure = getattr(figures, field)
            allowed = goal * figures.functions / 100 if field in PER_100_FUNCTIONS else goal
            bound = bounds.get(name, {}).get(field, 0)
            if figure > max(bound, allowed):
                problems.append(f"{name}: {field} is {figure}, and may be at most {max(bound, allowed):g}")
    return problems


def subject_lines(paths: Iterable[str], root: Path = ROOT) -> int:
    """Code lines of the files that patterns of paths name, each once. Raises: ValueError, a pattern names none."""
    files: set[Path] = set()
    for pattern in paths:
        matches = set(root.glob(pattern))
        if not matches:
            raise ValueError(f"{pattern} of tools/bounds.json names no file; remove it there")
        files |= matches
    return sum(figures_of(file).code for file in files)


def subjects_over_budget(subjects: dict[str, Any], root: Path = ROOT) -> list[str]:
    """List subjects whose files have more code lines than their budget."""
    counts = {name: subject_lines(subject["paths"], root) for name, subject in subjects.items()}
    return [
        f"{name}: code is {count}, and may be at most {subjects[name]['code']}"
        for name, count in counts.items()
        if count > subjects[name]["code"]
    ]


def bounds_of(totals: dict[str, Figures]) -> dict[str, dict[str, int]]:
    """Bounds that the figures of today keep, and budgets of code with a little room."""
    bounds = {name: {field: getattr(figures, field) for field in GOALS} for name, figures in totals.items()}
    return {name: {**row, "code": math.ceil(ROOM * row["code"])} for name, row in bounds.items()}


def bounds_text(bounds: dict[str, Any]) -> str:
    """Bounds as JSON with a line for each package."""
    rows = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in bounds.items()]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def table(totals: dict[str, Figures]) -> str:
    """The figures in columns, with a row for their sum; dense statements and vague functions per 100 functions."""
    whole = sum(totals.values(), Figures())
    header = ("", *Figures._fields, "dense/100", "vague/100")
    rows = [header]
    for name, figures in (*totals.items(), ("all", whole)):
        functions = max(figures.functions, 1)
        shares = (f"{100 * figures.dense / functions:.0f}", f"{100 * figures.vague / functions:.0f}")
        rows.append((name, *(f"{number:,}" for number in figures), *shares))
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0])] + [x.rjust(w) for x, w in zip(row[1:], widths[1:], strict=True)])
        for row in rows
    )


def main() -> int:
    root = next((Path(text) for text in sys.argv[1:] if not text.startswith("-")), ROOT)
    print(table(by_package(root)))
    subjects = json.loads(BOUNDS.read_text())["subjects"]
    print("\nCode lines of subjects:")
    for name, subject in subjects.items():
        print(f"{name:20}{subject_lines(subject['paths'], root):8,}")
    print("\nCode lines elsewhere:")
    for what, count in code_lines_elsewhere(root).items():
        print(f"{what:20}{count:8,}")
    if "--functions" in sys.argv:
        print("\n".join(excesses(root)))
    if "--bounds" in sys.argv:
        for subject in subjects.values():
            subject["code"] = math.ceil(ROOM * subject_lines(subject["paths"], root))
        BOUNDS.write_text(bounds_text(bounds_of(by_package(root)) | {"subjects": subjects}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
