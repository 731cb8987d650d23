"""docs/algorithms.md: its table is what the code says, and its snippets run.

After a change of an algorithm the table is written anew by

    python tests/algos/test_algorithms_doc.py
"""

import ast
import doctest
import importlib
import inspect
import pathlib
import pkgutil
import re

import torch
from pieces import NAMED

import funrl.algos
from funrl.algos.core import needs_of

DOC = pathlib.Path(__file__).parents[2] / "docs" / "algorithms.md"
BEGIN, END = "<!-- table: written by tests/algos/test_algorithms_doc.py -->", "<!-- end of table -->"
COLUMNS = ("algorithm", "advantage", "losses", "reduction", "filter", "KL", "reads")
PLUMBING = {"policy", "together", "reduce", "chain", "scale", "add", "restrict", "Algorithm", "ppo"}
BATCH_ALWAYS = {"tokens", "mask"}


def functions(name):
    """The public functions of a named algorithm's module: the algorithm, and its variants."""
    module = importlib.import_module(f"funrl.algos.{name}")
    own = [f for f in vars(module).values() if inspect.isfunction(f) and f.__module__ == module.__name__]
    return module, own


def calls(fn):
    """The names that a function calls, in the order of the source, `pf_ppo`'s base included."""
    tree = ast.parse(inspect.getsource(fn))
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    return [n.func.id for n in sorted(found, key=lambda n: (n.lineno, n.col_offset))]


def ingredients(module, fn):
    """{kind: piece names} of a function, by what the pieces return."""
    kinds = {"Advantage": "advantage", "Term": "losses", "Ratio": "losses", "Loss": "losses"}
    kinds |= {"Reduction": "reduction", "Filter": "filter", "Lambda": "advantage"}
    out = {kind: [] for kind in kinds.values()}
    for name in sorted(dict.fromkeys(calls(fn)), key=lambda name: name == "ppo"):  # a base comes last
        piece = getattr(module, name, None)
        kind = inspect.signature(piece).return_annotation if inspect.isfunction(piece) else None
        if name not in PLUMBING and kind in kinds:
            out[kinds[kind]].append(f"`{name}`")
        elif name == "ppo":
            base = ingredients(importlib.import_module("funrl.algos.ppo"), piece)
            out = {k: v + base[k] for k, v in out.items()}
    return out


def kl(fn):
    parameters = inspect.signature(fn).parameters
    if "kl_loss" in parameters and "kl_reward" in parameters:
        return "loss or reward, off"
    if "kl_loss" in parameters:
        default = parameters["kl_loss"].default
        return f"loss, {default:g}" if default else "loss, off"
    return "reward, off" if "kl_reward" in parameters else "-"


def row(name, module, fn):
    parts = ingredients(module, fn)
    paper = re.search(r"https://\S+?(?=[\s.,;]*\s|\.?$)", module.__doc__.replace("\n", " \n"))
    assert paper, f"{name} names no paper"
    reads = ", ".join(sorted(needs_of(fn()) - BATCH_ALWAYS))
    cells = [f"[{fn.__name__}]({paper.group(0)})", *(", ".join(parts[k]) or "-" for k in COLUMNS[1:5]), kl(fn), reads]
    return "| " + " | ".join(cells) + " |"


def table():
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for name in NAMED:
        module, own = functions(name)
        lines += [row(name, module, fn) for fn in own]
    return "\n".join(lines)


def test_the_table_is_what_the_code_says():
    text = DOC.read_text()
    written = text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()
    assert written.splitlines() == table().splitlines()


def test_every_snippet_runs():
    snippets = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)
    assert len(snippets) >= 3
    namespace: dict = {}
    for snippet in snippets:
        exec(compile(snippet, str(DOC), "exec"), namespace)


def test_examples_in_docstrings_print_what_they_say():
    attempted = 0
    for info in pkgutil.iter_modules(funrl.algos.__path__):
        module = importlib.import_module(f"funrl.algos.{info.name}")
        result = doctest.testmod(module, extraglobs={"torch": torch})
        assert result.failed == 0, info.name
        attempted += result.attempted
    assert attempted > 0


def test_every_module_of_a_named_algorithm_says_what_the_others_do():
    for name in NAMED:
        module, own = functions(name)
        assert name in {fn.__name__ for fn in own}
        assert "References: " in module.__doc__
        assert "verl" in module.__doc__ and "TRL" in module.__doc__, name


if __name__ == "__main__":
    text = DOC.read_text()
    DOC.write_text(text[: text.index(BEGIN) + len(BEGIN)] + "\n\n" + table() + "\n\n" + text[text.index(END) :])
    print(f"wrote {DOC}")
