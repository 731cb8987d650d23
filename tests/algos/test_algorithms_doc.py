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

import funrl.algos
from funrl import algos
from funrl.algos import NAMES, reads, value_of

DOC = pathlib.Path(__file__).parents[2] / "docs" / "algorithms.md"
BEGIN, END = "<!-- table: written by tests/algos/test_algorithms_doc.py -->", "<!-- end of table -->"
COLUMNS = ("algorithm", "advantage", "losses", "reduction", "filter", "KL", "also reads")
COMMON = {"mask", "score", "group", "old_logp"}  # too common to be in the table
KINDS = {"Advantage": "advantage", "Lambda": "advantage", "Reduction": "reduction", "Filter": "filter"}
KINDS |= dict.fromkeys(("Term", "Ratio", "Loss", "PairLoss", "PairReward", "PairWeight"), "losses")
PLUMBING = {"with_regularizers", "sum_losses", "reduce", "chain", "scale", "add", "restrict", "weighted", "run_term"}


def calls(fn):
    """The names that a function calls, in the order of the source."""
    tree = ast.parse(inspect.getsource(fn))
    results = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    return [n.func.id for n in sorted(results, key=lambda n: (n.lineno, n.col_offset))]


def ingredients(name):
    """{kind: piece names} of a recipe, by what the pieces return; of one on top of ppo or dpo, also those of it."""
    out: dict[str, list[str]] = {kind: [] for kind in KINDS.values()}
    called = dict.fromkeys(calls(algos.recipe(name)))
    for piece in called:
        value = getattr(algos, piece, None)
        kind = inspect.signature(value).return_annotation if inspect.isfunction(value) else None
        if piece not in PLUMBING and kind in KINDS:
            out[KINDS[kind]].append(f"`{piece}`")
    below = [ingredients(base) for base in ("ppo", "dpo") if base in called]
    return {k: v + [piece for base in below for piece in base[k]] for k, v in out.items()}


def kl(name):
    recipe = algos.recipe(name)
    default = inspect.signature(recipe).parameters.get("kl_coef")
    if default is None:
        return kl("ppo") if "ppo" in calls(recipe) else ""
    where = "reward" if "kl_controller" in calls(recipe) else "loss"
    return f"{where}, {default.default:g}" if default.default else f"{where}, off"


def row(name):
    parts, recipe = ingredients(name), algos.recipe(name)
    text = inspect.getmodule(recipe).__doc__
    paper = re.search(r"https://\S+?(?=[\s.,;]*\s|\.?$)", text[text.index("References: ") :].replace("\n", " \n"))
    assert paper, f"{name} names no paper"
    needed = ", ".join(sorted(reads(recipe()).required - COMMON))
    cells = [f"[{name}]({paper.group(0)})", *(", ".join(parts[k]) for k in COLUMNS[1:5]), kl(name), needed]
    return "| " + " | ".join(cells) + " |"


def table():
    return "\n".join(["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS), *map(row, NAMES)])


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
    for info in pkgutil.walk_packages(funrl.algos.__path__, "funrl.algos."):
        result = doctest.testmod(importlib.import_module(info.name), extraglobs={"torch": torch, "value_of": value_of})
        assert result.failed == 0, info.name
        attempted += result.attempted
    assert attempted >= 6


def test_every_recipe_says_what_the_others_do():
    for name in NAMES:
        text = inspect.getmodule(algos.recipe(name)).__doc__
        assert "References: " in text and "verl" in text and "TRL" in text, name


def test_every_piece_that_a_user_may_choose_is_on_the_page_of_pieces():
    text = DOC.with_name("pieces.md").read_text()
    kinds = {*KINDS, "Controller", "Selection"}
    pieces = {
        name
        for name in algos.WHERE
        if inspect.isfunction(value := getattr(algos, name))
        and inspect.signature(value).return_annotation in kinds
        and name not in NAMES
    }
    internal = {"kl_to", "loss_of_part", "or_token_ratio", "run_term"}
    assert len(pieces) > 80
    assert {name for name in pieces - internal if f"`{name}" not in text} == set()


if __name__ == "__main__":
    text = DOC.read_text()
    DOC.write_text(text[: text.index(BEGIN) + len(BEGIN)] + "\n\n" + table() + "\n\n" + text[text.index(END) :])
    print(f"wrote {DOC}")
