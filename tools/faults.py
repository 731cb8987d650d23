"""Faults that the tests have to find: 60 mutations of the heart's code, drawn by a seed.

    python tools/faults.py --draw          # write tests/faults.json anew
    python tools/faults.py --run           # plant each of them in a copy of the checkout and run the tests of its file
    python tools/faults.py --run --only=7  # one of them

A fault is kept as its file, its function and its line before and after, so it can be planted when lines have moved. It
counts as found when a test fails in a file that names its module or its function, in its package or in tests/golden.
"""

from __future__ import annotations

import ast
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from absl import app, flags

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "faults.json"
SEED, COUNT = 0, 60
LONGEST = 900  # seconds of the tests of one fault
# Packages whose code stays; each gives faults in proportion to its statements.
HEART = (
    "algos/advantages",
    "algos/corrections",
    "algos/filters",
    "algos/losses",
    "compiled_kernels",
    "data",
    "environments",
    "mesh",
    "models/decoder",
    "optim",
    "rewards",
    "rollout/native",
    "serve",
    "trainer/checkpoints",
    "trainer/steps",
    "trainer/storage",
)
COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}

_RUN = flags.DEFINE_boolean("run", False, "plant the faults and run the tests")
_DRAW = flags.DEFINE_boolean("draw", False, "write the list anew")
_ONLY = flags.DEFINE_list("only", [], "numbers of the faults to run")


class Fault(NamedTuple):
    """A mutation of one line.

    Attributes:
      file: relative to the checkout.
      line: its number when the fault was drawn.
      function: the qualified name of the function that has it.
      before, after: the text of the line.
    """

    file: str
    line: int
    function: str
    before: str
    after: str


def candidates(file: Path) -> Iterator[Fault]:
    """Mutations of a file that change one line and leave its syntax right."""
    text = file.read_text()
    lines = text.splitlines()
    for name, function in _functions(ast.parse(text)):
        for node in ast.walk(function):
            number = getattr(node, "lineno", 0)
            if number and number == getattr(node, "end_lineno", 0):
                before = lines[number - 1]
                after = _mutated_line(node, before)
                if after and after != before and not before.lstrip().startswith(("assert", "raise", "def ", "@")):
                    yield Fault(file.relative_to(ROOT).as_posix(), number, name, before, after)


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{f.name}", f) for f in node.body if isinstance(f, ast.FunctionDef))


def _mutated_line(node: ast.AST, line: str) -> str | None:
    """The line with a node of it changed, or None where the kind of node has no mutation."""
    changed = _mutation(node)
    if changed is None:
        return None
    start, end = node.col_offset, node.end_col_offset  # type: ignore[attr-defined]
    whole = line.encode()
    return (whole[:start] + f"({ast.unparse(changed)})".encode() + whole[end:]).decode()


def _mutation(node: ast.AST) -> ast.expr | None:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=comparators) if type(op) in COMPARISONS:
            return ast.Compare(left, [COMPARISONS[type(op)]()], comparators)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            return ast.BinOp(left, ARITHMETIC[type(op)](), right)
        case ast.BoolOp(op=op, values=values):
            return ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return ast.Constant(value + 1)
    return None


def draw(seed: int = SEED, count: int = COUNT) -> list[Fault]:
    """Faults of distinct functions, drawn evenly over all candidates."""
    files = [file for folder in HEART for file in sorted((ROOT / "funrl" / folder).rglob("*.py"))]
    faults = [fault for file in dict.fromkeys(files) for fault in candidates(file)]
    random.Random(seed).shuffle(faults)
    by_function = {(fault.file, fault.function): fault for fault in reversed(faults)}
    ordered = [fault for fault in faults if by_function[fault.file, fault.function] is fault]
    return ordered[:count]


def tests_of(fault: Fault, root: Path) -> list[str]:
    """Test files that name the module of a fault or its function, then those of its package, then the golden runs."""
    module = fault.file.removesuffix(".py").replace("/", ".")
    package, _, stem = module.rpartition(".")
    function = fault.function.split(".")[0]
    own = root / "tests" / Path(fault.file).parent.relative_to("funrl")
    named, beside = [], []
    for file in sorted((root / "tests").rglob("test_*.py")):
        text = file.read_text()
        if module in text or f"import {stem}" in text or function in text or stem == file.stem.removeprefix("test_"):
            named.append(file)
        elif file.parent == own or package in text:
            beside.append(file)
    chosen = sorted(named, key=lambda file: file.parent != own) + beside
    golden = sorted((root / "tests" / "golden").glob("test_*.py"))
    return [file.relative_to(root).as_posix() for file in dict.fromkeys((*chosen, *golden))]


def plant(fault: Fault, root: Path) -> bool:
    """Change the line in a checkout; False where the function has it no more."""
    path = root / fault.file
    if not path.exists():
        return False
    text = path.read_text()
    lines = text.splitlines()
    for name, function in _functions(ast.parse(text)):
        if name == fault.function:
            for number in range(function.lineno - 1, function.end_lineno or 0):
                if lines[number].strip() == fault.before.strip():
                    indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
                    lines[number] = indent + fault.after.strip()
                    path.write_text("\n".join(lines) + "\n")
                    return True
    return False


def first_failure(fault: Fault, root: Path) -> str | None:
    """The first test that fails on a planted fault, or the signal that ends the tests; None: all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow and not timed", "-p", "no:cacheprovider"]
    cache = os.environ.get("FUNRL_TEST_CACHE", str(root / "build"))
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
        "FUNRL_TEST_CACHE": cache,
    }
    try:
        run = subprocess.run(
            [*command, *tests_of(fault, root)],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LONGEST,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "no end in time"
    if run.returncode < 0:
        return f"ended by signal {-run.returncode}"
    failures = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (failures or [run.stdout[-200:]])[0] if run.returncode else None


def _run(faults: list[Fault], numbers: list[int]) -> None:
    for number in numbers:
        fault = faults[number]
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "funrl"
            subprocess.run(["git", "clone", "-q", str(ROOT), str(root)], check=True)
            began = time.time()
            result = first_failure(fault, root) if plant(fault, root) else "line not there"
        print(
            f"{number}\t{time.time() - began:.0f} s\t{fault.file}:{fault.function}\t{result or 'NOT FOUND'}", flush=True
        )


def main(_: list[str]) -> None:
    if _DRAW.value:
        LIST.write_text(json.dumps([fault._asdict() for fault in draw()], indent=1) + "\n")
    faults = [Fault(**row) for row in json.loads(LIST.read_text())]
    if _RUN.value:
        _run(faults, [int(number) for number in _ONLY.value] or list(range(len(faults))))


if __name__ == "__main__":
    app.run(main)
