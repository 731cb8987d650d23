"""Explanations: the composition of recipes and of pieces of one's own, with their docstrings."""

import inspect
from pathlib import Path

import pytest

from funrl import algos
from funrl.algos import (
    Algorithm,
    add,
    chain,
    clipped_surrogate,
    corrected,
    entropy_bonus,
    group_center,
    importance_weights,
    kl_to_reference,
    recipe,
    reduce,
    scale,
    stateless,
    times_ratio,
    to_tokens,
    token_mean,
)
from funrl.algos.composition import chain_links, expression, is_piece, piece_call
from funrl.algos.explanation import explain_algorithm
from funrl.cli import main as cli

GRPO = """\
advantage, from the score of each row:
  1. group_center()
  2. group_scale(eps=1e-06)
  3. to_tokens()
loss of policy:
  sequence_mean() of (weighted(term=clipped_surrogate(clip_low=0.2, clip_high=0.2, dual_clip=None,
    ratio=token_ratio(sampled_by='old_logp'), delta=None)) + 0.04 * kl_to(field='ref_logp',
    metric='actor/kl_loss', estimate=kl_estimate(kind='k3')))"""
DPO = """\
loss of policy:
  sequence_mean() of preference(loss=sigmoid_pairs(beta=0.1, smoothing=0.0, margin=0.0),
    reward=reference_log_ratio(per_token=False, divergence='reverse_kl', divergence_alpha=0.5,
    length_alpha=1.0), weight=None)"""


def test_the_composition_of_recipes():
    assert str(recipe("grpo")(kl_coef=0.04, dual_clip=None)) == GRPO
    assert str(recipe("dpo")()) == DPO
    ppo = repr(recipe("ppo")(kl_target=0.1, gamma=0.9))
    assert "\n  3. gae(gamma=0.9, gae_lambda=0.95, critic_lambda=None)\n" in ppo
    assert "loss of critic:\n  token_mean() of clipped_value_loss(value_clip=0.5)\nloss of policy:" in ppo
    assert "divergence:\n  Divergence(beta=0.5, temperature=2, role='teacher')" in repr(recipe("gkd")(temperature=2))
    assert repr(recipe("dapo")()).endswith("rows that are trained on:\n  unequal_scores()")
    assert " + restrict(loss=token_mean() of negative_log_likelihood()" in " ".join(repr(recipe("cpo")()).split())


WITH_OPTIONS = {  # recipes whose options bring other pieces
    "grpo": {"dual_clip": None, "kl_bias_corrected": True, "entropy_coef": 0.1},
    "ppo": {"kl_target": 0.1, "gamma": 0.9, "value_clip": None},
    "gspo": {"per_token": True},
    "dpo": {"loss": "0.5*sigmoid+0.5*bco", "divergence": "js", "length_alpha": 0.5, "on_policy": True},
    "dppo": {"kind": "kl", "sampled_by": "old_logp"},
    "distillation": {"kind": "forward", "rest": True},
    "gkd": {"beta": 1.0, "temperature": 2.0},
    "gdpo": {"reward_weights": "1,0.5", "deviation": False},
}
EXPLAINED = [(name, {}) for name in algos.NAMES] + list(WITH_OPTIONS.items()) + [("dpo", {"loss": "aot"})]


@pytest.mark.parametrize(("name", "options"), EXPLAINED, ids=str)
def test_every_recipe_is_explained(name, options):
    """Each piece by its call and its docstring."""
    algorithm = recipe(name)(**options)
    explanation = explain_algorithm(algorithm)
    text = str(explanation)
    assert text.startswith(repr(algorithm)) and text.isascii()
    assert "<" not in repr(algorithm).replace("<locals>", "<"), "a piece that is not named by its call"
    assert all(len(line) <= 120 for line in text.splitlines())
    assert set(explanation.required) == algos.reads(algorithm).required
    links = (
        [] if algorithm.advantage is None else [piece_call(piece).name for piece in chain_links(algorithm.advantage)]
    )
    notes = {note.name: note for note in explanation.pieces}
    assert set(links) <= {*notes}
    for note in explanation.pieces:
        assert note.name in algos.WHERE or note.name == "kl_to", note.name
        assert inspect.getdoc(getattr(algos, note.name)).startswith(note.description)
        assert not any(section in note.description for section in ("\nArgs:", "\nNeeds:", "\nRaises:", "\nWarning:"))


def test_factors_and_sums_show_where_they_act():
    weighted = corrected(recipe("grpo")(kl_coef=0.0, dual_clip=None), importance_weights("token", high=2.0))
    assert "1. importance_weights(over='token', low=0.0, high=2.0)\n" in repr(weighted)
    term = add(scale(0.5, add(times_ratio(entropy_bonus(0.1)), entropy_bonus(0.2))), entropy_bonus(0.3))
    assert expression(reduce(term, token_mean())) == (
        "token_mean() of (0.5 * (times_ratio(term=entropy_bonus(entropy_coef=0.1), "
        "ratio=token_ratio(sampled_by='old_logp')) + entropy_bonus(entropy_coef=0.2)) "
        "+ entropy_bonus(entropy_coef=0.3))"
    )
    assert expression(kl_to_reference("k3+")).endswith("estimate=kl_estimate(kind='k3+'))")


def own(power: float = 2.0):
    """-A^power log pi, of my own.

    References: Me, 2026, https://arxiv.org/abs/0000.00000
    """

    def term(logp_BT, batch):
        return -(batch.advantage**power) * logp_BT, {}

    return term


def mine() -> Algorithm:
    doubled = stateless(lambda x_B, batch: 2 * x_B)
    return Algorithm(chain(group_center(), doubled, to_tokens()), {"policy": reduce(own(3.0), token_mean())})


def test_pieces_of_ones_own_show_by_name_arguments_and_docstring():
    assert repr(mine()).endswith("loss of policy:\n  token_mean() of own(power=3.0)")
    assert "\n  2. the function at test_explanation.py:" in repr(mine()) and "lambda" not in repr(mine())
    notes = {note.name: note for note in explain_algorithm(mine()).pieces}
    assert notes["own"].description == "-A^power log pi, of my own."
    assert notes["own"].references == ("https://arxiv.org/abs/0000.00000",)
    assert piece_call(clipped_surrogate(0.1)).arguments["clip_low"] == 0.1
    assert is_piece(clipped_surrogate) and is_piece(token_mean()) and not is_piece((1, 2)) and not is_piece(int)


def test_an_algorithm_that_cannot_be_run_still_shows_its_composition():
    broken = Algorithm(chain(group_center()), {"policy": reduce(own(), token_mean())})
    broken = Algorithm(None, broken.losses, filter=lambda batch: batch.nothing_of_the_kind)
    assert repr(broken).startswith("loss of policy:\n  token_mean() of own(power=2.0)\nrows that are trained on:")
    with pytest.raises(algos.PieceError):
        explain_algorithm(broken)


def test_the_command_explains_recipes_and_files(tmp_path, capsys):
    assert cli.main(["funrl", "explain", "grpo", "--kl_coef=0", "--clip_high=0.3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("grpo: Group relative policy optimisation.\n\nadvantage, from") and "clip_high=0.3" in out
    file = tmp_path / "own.py"
    file.write_text("from funrl.algos import gspo\n\n\ndef mine(clip: float = 0.1):\n    return gspo(clip, clip)\n")
    assert cli.main(["funrl", "explain", f"{file}:mine", "--clip=0.25"]) == 0
    assert "clip_high=0.25" in capsys.readouterr().out
    for words, says in (
        (["grpo", "--kl_coeff=0"], "--kl_coeff is not a flag; did you mean --kl_coef?"),
        (["grpo", "--latex"], "--latex is not a flag any more; funrl explain prints"),
        (["grpoo"], "did you mean grpo?"),
        ([], "usage: funrl explain RECIPE|FILE.py:NAME"),
    ):
        assert cli.main(["funrl", "explain", *words]) == 2
        assert says in capsys.readouterr().err


def test_the_page_shows_what_the_command_prints():
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    shown = page.partition("funrl explain grpo --kl_coef=0.04")[2].partition("```text\n")[2].partition("```")[0]
    assert shown.count("\n") > 5 and shown in str(explain_algorithm(recipe("grpo")(kl_coef=0.04)))
