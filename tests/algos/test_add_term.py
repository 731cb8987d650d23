"""A new term is four files by hand: its piece, its name in the index, its recipe, its row; CONTRIBUTING.md says so."""

import pytest
from checkouts import broken_rules, copy_checkout, insert_after, run_in

PIECE = '''"""Surrogates with the root of the ratio."""

from __future__ import annotations

from funrl.algos.losses.ratios import token_ratio
from funrl.algos.terms import Metrics, Term
from funrl.batch import Batch, Tensor


def root_surrogate(power: float = 0.5) -> Term:
    """A ratio that grows by its root only, -A r^power, per token.

    Args:
      power: exponent of the ratio.
    Needs: old_logp [B, T], advantage [B, T].
    Returns: a term.
    """
    ratio = token_ratio()

    def term(logp_BT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        return -batch.advantage * ratio(logp_BT, batch) ** power, {}

    return term
'''
RECIPE = '''"""Root policy optimisation: GRPO with the root of the ratio instead of its clip.

References: none, a test of CONTRIBUTING.md.
verl: none. TRL: none.
"""

from __future__ import annotations

from funrl.algos.advantages.baselines import group_center
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.reductions import sequence_mean
from funrl.algos.losses.roots import root_surrogate


def root_po(power: float = 0.5) -> Algorithm:
    """Root policy optimisation.

    Args:
      power: exponent of the ratio.
    """
    return Algorithm(
        advantage=chain(group_center(), to_tokens()),
        losses={"policy": reduce(root_surrogate(power), sequence_mean())},
    )
'''
ROWS = '''"""Pieces with roots: references."""

from math import exp

from pieces import Row, grid, sampled

from funrl import algos


def root(power):
    def reference(logp, b):
        out = grid(b)
        for i in range(len(out)):
            for t in sampled(b, i):
                out[i][t] = -b.advantage[i][t] * exp(logp[i][t] - b.old_logp[i][t]) ** power
        return out

    return reference


ROWS = [Row("root_surrogate", "term", lambda: algos.root_surrogate(0.25), root(0.25), smooth=True)]
'''


@pytest.mark.slow
def test_a_term_with_a_recipe_is_four_files(tmp_path):
    folder = copy_checkout(tmp_path)
    (folder / "funrl/algos/losses/roots.py").write_text(PIECE)
    insert_after(folder / "funrl/algos/__init__.py", "_PIECES = {", '    "losses.roots": "root_surrogate",\n')
    (folder / "funrl/algos/recipes/root_po.py").write_text(RECIPE)
    (folder / "tests/algos/rows_roots.py").write_text(ROWS)
    tests = ("tests/algos/test_pieces.py", "tests/algos/test_completeness.py", "tests/algos/test_explanation.py")
    run_in(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "root_surrogate or every or index", *tests)
    assert "root" not in broken_rules(folder)
    assert "root policy optimisation" in run_in(folder, "-m", "funrl.cli.main", "--help").lower()
    assert "--power" in run_in(folder, "-m", "funrl.cli.main", "root_po", "--help")
