"""Explanations: formulas of the recipes, of compositions and of pieces of one's own."""

import functools
import inspect
import re
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
    recipe,
    reduce,
    scale,
    stateless,
    times_ratio,
    to_tokens,
    token_mean,
)
from funrl.algos.explanation import DEFINED, JOINS, call_text, explain_algorithm, node_of, plain
from funrl.algos.notation import MEANINGS, occurs
from funrl.algos.notation_chains import NON_ARITHMETIC, STEPS
from funrl.algos.notation_losses import FORMULAS
from funrl.cli import main as cli

MEAN = "1 / (sum_i |o_i|) sum_i sum_(t in o_i) "
CLIPPED = "min(r_t A_t, clip(r_t, 1 - 0.2, 1 + 0.2) A_t)"


def losses_of(algorithm):
    return {role: plain(formula) for role, formula in explain_algorithm(algorithm).losses.items()}


def test_the_formulas_of_recipes_are_those_of_their_papers():
    assert losses_of(recipe("grpo")(kl_coef=0.04, dual_clip=None)) == {
        "policy": f"1 / n sum_i 1 / |o_i| sum_(t in o_i) [-{CLIPPED} + 0.04 KL_k3(pi || pi_ref)]"
    }
    assert [plain(step.formula) for step in explain_algorithm(recipe("grpo")()).steps[:2]] == [
        "x_i - mean_G(x)",
        "x_i / (std_G(x) + 10^-6)",
    ]
    assert losses_of(recipe("ppo")(value_clip=None, dual_clip=None)) == {
        "critic": MEAN + "(V_t - R_t)^2 / 2",
        "policy": MEAN + f"[-{CLIPPED}]",
    }
    h = "sum_t log(pi(t) / pi_ref(t))"
    pairs = "1 / n sum_i 1 / |o_i| sum_(t in o_i) [-log sigma(0.1 (h_w - h_l))]"
    assert losses_of(recipe("dpo")()) == {"policy": f"{pairs}, h = {h}"}
    assert losses_of(recipe("sft")()) == {"policy": MEAN + "[-log pi(t)]"}
    assert losses_of(recipe("dr_grpo")(max_new_tokens=99))["policy"].startswith(
        "1 / (99 n) sum_i sum_(t in o_i) [-min("
    )


WITH_OPTIONS = {  # recipes whose options bring other pieces
    "grpo": {"dual_clip": None, "kl_bias_corrected": True, "entropy_coef": 0.1},
    "ppo": {"kl_target": 0.1, "gamma": 0.9, "value_clip": None},
    "gspo": {"per_token": True},
    "dpo": {"loss": "0.5*sigmoid+0.5*bco", "divergence": "js", "length_alpha": 0.5, "on_policy": True},
    "dppo": {"kind": "kl", "sampled_by": "old_logp"},
    "distillation": {"kind": "forward", "rest": True},
    "gkd": {"beta": 1.0, "temperature": 2.0},
    "gvpo": {"to_reference": True},
    "topr": {"per_token": True},
    "fipo": {"safe_ratio": None, "dual_clip": None},
    "gdpo": {"reward_weights": "1,0.5", "deviation": False},
    "kto": {"desirable": 2.0},
}
EXPLAINED = [(name, {}) for name in algos.NAMES] + list(WITH_OPTIONS.items()) + [("dpo", {"loss": "aot"})]
COMMANDS = (
    "begin end left right quad frac sqrt operatorname mathrm mathbf mathcal leftarrow sum prod max min log exp cos pi"
    " rho sigma tau delta lambda mu beta in notin leq geq neq cdot circ"
)


@functools.cache
def explained(name, options):
    return explain_algorithm(recipe(name)(**dict(options)))


def explanation_of(name, options):
    return explained(name, tuple(options.items()))


@pytest.mark.parametrize(("name", "options"), EXPLAINED, ids=str)
def test_every_recipe_is_written_out(name, options):
    found = explanation_of(name, options)
    for step in found.steps:
        assert step.formula or step.call.partition("(")[0] in NON_ARITHMETIC, step.call
    formulas = [plain(text) for text in (*found.losses.values(), *(x for step in found.steps for x in step.statements))]
    calls = {word for text in formulas for word in re.findall(r"\b[A-Za-z_]\w*(?=\()", text)}
    assert not calls & {*algos.WHERE} and not any("_pairs" in word or "loss" in word for word in calls), calls
    assert not any("None" in text or "True" in text or "False" in text for text in formulas), formulas
    for formula in found.losses.values():
        defined = [text.partition(" = ")[0] for text in formula.split(DEFINED)[1:]]
        assert len(defined) == len(set(defined)), defined
    text = str(found)
    assert (
        text.isascii()
        and "\\" not in text
        and "{" not in "".join(formulas)
        and all(len(x) < 140 for x in text.splitlines())
    )
    assert set(found.required) == algos.reads(recipe(name)(**options)).required


@pytest.mark.parametrize(("name", "options"), EXPLAINED, ids=str)
def test_latex_is_of_standard_commands_and_balanced(name, options):
    latex = explanation_of(name, options).latex
    assert not re.search(r"<\w+>", latex), "an argument that was not filled in"
    assert set(re.findall(r"\\([A-Za-z]+)", latex)) <= set(COMMANDS.split())
    assert set(re.findall(r"\\([^A-Za-z])", latex)) <= set("\\ |_"), latex
    begin, *rows, end = latex.splitlines()
    assert (begin, end) == (r"\begin{aligned}", r"\end{aligned}")
    for row in (one for line in rows for one in re.split(r"\\\\", line) if one.strip()):
        assert row.count("&") == 1, row
        assert row.count(r"\left(") == row.count(r"\right)") and row.count(r"\left[") == row.count(r"\right]"), row
        depth = 0
        for brace in re.findall(r"(?<!\\)[{}]", row):
            depth += 1 if brace == "{" else -1
            assert depth >= 0, row
        assert depth == 0, row
        assert not re.search(r"_(\w|\{\w*\})_|\^(\w|\{\w*\})\^", row), f"two indices: {row}"


def test_every_piece_has_a_formula():
    kinds = {"Term", "Ratio", "Reduction", "PairLoss", "PairReward", "PairWeight", "Selection"}
    made = {name: getattr(algos, name) for name in algos.WHERE if name not in algos.NAMES}
    made = {name: x.__annotations__.get("return") for name, x in made.items() if inspect.isfunction(x)}
    helpers = {"or_token_ratio", "with_regularizers"}  # they return what they are given, or a sum
    in_losses = {name for name, kind in made.items() if kind in kinds} - helpers
    in_chains = {name for name, kind in made.items() if kind == "Advantage"} - {"chain", "stateless", "token_rewards"}
    assert len(in_losses) > 60 and len(in_chains) > 40
    by_others = {"kl_to_old", "kl_to_teacher", "sequence_sum_mean"}  # of kl_to, and of constant_mean
    assert in_losses - by_others <= {*FORMULAS, *JOINS}
    assert in_chains == {*STEPS, *NON_ARITHMETIC} & in_chains
    assert {*FORMULAS, *STEPS, *JOINS} <= {*algos.WHERE}


def test_each_symbol_that_is_explained_is_in_a_formula():
    explanations = [explanation_of(name, options) for name, options in EXPLAINED]
    texts = [text for one in explanations for text in one.losses.values()]
    texts += [text for one in explanations for step in one.steps for text in step.statements]
    rare = {r"c_{\mathrm{ent}}", *(symbol for symbol in MEANINGS if "KL}_{" in symbol)}
    assert not [x for x in MEANINGS if x not in rare and not any(occurs(x, text) for text in texts)]


CORRECTIONS = {
    "w_t <- clip(pi_old(t) / pi_rollout(t), 0, 3)": importance_weights("token", 0.0, 3.0),
    "w_t <- clip(exp(mean_t log(pi_old(t) / pi_rollout(t))), 0.5, 2)": importance_weights("geometric", 0.5, 2.0),
    "m_t <- m_t 1[0.5 <= exp(sum_t log(pi_old(t) / pi_rollout(t))) <= 5]": algos.reject_ratio("sequence"),
    "w_t <- 1[0.5 <= pi_old(t) / pi_rollout(t) <= 5]": algos.reject_ratio(in_denominator=True),
    "m_t <- m_t 1[max_t KL_k2(pi_rollout || pi_old) <= 0.2]": algos.reject_divergence("k2", "max", 0.2),
    "m_t <- m_t 1[row i was not cut off]": algos.mask_truncated(),
    "w_t <- 1[row i was not cut off]": algos.mask_truncated(in_denominator=True),
    "x <- 0.5 x_i where row i was cut off, else x_i": algos.stop_properly(0.5),
    "x <- -1 where row i was cut off, else x_i": algos.stop_properly(-1.0),
    "x <- x_i - 0.5 max(0, |o_i| - (100 - 20)) / 20": algos.overlong_penalty(100, 20, 0.5),
    "x <- x_i / (std_(|G| > 1)(x) + 10^-6)": algos.batch_scale(alone=False),
    "x <- sum_k w_k score_(i,k)": algos.weighted_scores([1.0, 0.5]),
    "x <- (x_i - mean_run(x)) / sqrt(var_run(x) + 10^-8)": algos.running_normalise(),
}


@pytest.mark.parametrize("statement", CORRECTIONS)
def test_corrections_are_statements_of_what_they_set(statement):
    algorithm = corrected(recipe("grpo")(), CORRECTIONS[statement])
    assert plain(explain_algorithm(algorithm).steps[0].statements[0]) == statement


def test_weights_of_two_corrections_are_multiplied():
    pieces = importance_weights(), algos.mask_truncated(in_denominator=True), algos.normalise_weights()
    steps = explain_algorithm(corrected(recipe("grpo")(), *pieces)).steps[1:3]
    assert [plain(step.statements[0]) for step in steps] == [
        "w_t <- w_t 1[row i was not cut off]",
        "w_t <- w_t / mean(w)",
    ]


def test_penalties_are_written_for_the_signal_that_they_get():
    per_row, per_token = recipe("rloo")(kl_coef=0.1), recipe("ppo")(kl_coef=0.1, kl_target=0.2)
    assert plain(explain_algorithm(per_row).steps[0].formula) == "x_i - 0.1 sum_t KL_k1(pi_old || pi_ref)"
    step = explain_algorithm(per_token).steps[1]
    assert plain(step.formula) == "x_t - beta KL_k1(pi_old || pi_ref)" and "0.2" in step.definitions[0]


def test_terms_on_some_tokens_are_written_with_a_condition():
    selected = algos.on_selected(clipped_surrogate()), algos.off_selected(clipped_surrogate())
    texts = [losses_of(Algorithm(None, {"policy": reduce(term, token_mean())}))["policy"] for term in selected]
    assert texts == [f"{MEAN}(-{CLIPPED}) 1[t {which} selected]" for which in ("in", "not in")]


def test_each_loss_of_a_sum_and_each_definition_has_a_line():
    text = str(explain_algorithm(recipe("tpo")()))
    assert f"\n  + {MEAN}[-log pi(t)] over gold\n    with h = sum_t log pi(t)\nwhere\n" in text


def test_weights_and_factors_show_where_they_act():
    weighted = corrected(recipe("grpo")(kl_coef=0.0, dual_clip=None), importance_weights("token", high=2.0))
    assert f"[-w_t {CLIPPED}]" in losses_of(weighted)["policy"]
    assert explain_algorithm(weighted).steps[0].call == "importance_weights(over='token', low=0.0, high=2.0)"
    term = add(scale(0.5, add(times_ratio(entropy_bonus(0.1)), entropy_bonus(0.2))), entropy_bonus(0.3))
    loss = Algorithm(None, {"policy": reduce(term, token_mean())})
    assert losses_of(loss) == {"policy": MEAN + "[0.5 (r_t (-0.1 H(pi_t)) - 0.2 H(pi_t)) - 0.3 H(pi_t)]"}


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
    found = explain_algorithm(mine())
    assert losses_of(mine()) == {"policy": MEAN + "own(power = 3)"}
    assert found.steps[1].call.startswith("the function at test_explanation.py:")
    notes = {note.name: note for note in found.pieces}
    assert notes["own"].summary.startswith("-A^power") and notes["own"].references == (
        "https://arxiv.org/abs/0000.00000",
    )
    assert call_text(node_of(clipped_surrogate(0.1, dual_clip=3.0))) == (
        "clipped_surrogate(clip_low=0.1, clip_high=0.2, dual_clip=3.0, "
        "ratio=token_ratio(sampled_by='old_logp'), delta=None)"
    )


def test_an_algorithm_shows_itself_as_text_and_in_a_notebook():
    algorithm = mine()
    assert repr(algorithm) == str(explain_algorithm(algorithm)) and "lambda" not in repr(algorithm)
    page = algorithm._repr_markdown_()
    assert page.startswith("$$\n\\begin{aligned}") and "```text" in page
    broken = Algorithm(chain(group_center()), {"policy": reduce(own(), token_mean())})
    broken_filter = Algorithm(None, broken.losses, filter=lambda batch: batch.nothing_of_the_kind)
    assert "cannot be explained" in repr(broken_filter) == broken_filter._repr_markdown_()


def test_the_command_explains_recipes_and_files(tmp_path, capsys):
    assert cli.main(["funrl", "explain", "grpo", "--kl_coef=0", "--clip_high=0.3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("grpo: Group relative policy optimisation.\n\nadvantage, from") and "1 + 0.3" in out
    file = tmp_path / "own.py"
    file.write_text("from funrl.algos import gspo\n\n\ndef mine(clip: float = 0.1):\n    return gspo(clip, clip)\n")
    assert cli.main(["funrl", "explain", f"{file}:mine", "--clip=0.25", "--latex"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("\\begin{aligned}") and "1 + 0.25" in out
    for words, says in (
        (["grpo", "--kl_coeff=0"], "--kl_coeff is not a flag; did you mean --kl_coef?"),
        (["grpoo"], "did you mean grpo?"),
        ([], "usage: funrl explain RECIPE|FILE.py:NAME"),
    ):
        assert cli.main(["funrl", "explain", *words]) == 2
        assert says in capsys.readouterr().err


def test_the_page_shows_what_the_command_prints():
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    shown = page.partition("funrl explain grpo --kl_coef=0.04")[2].partition("```text\n")[2].partition("```")[0]
    assert shown.count("\n") > 5 and shown in str(explain_algorithm(recipe("grpo")(kl_coef=0.04)))
