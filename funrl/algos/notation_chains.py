r"""Formulas of the steps of advantage chains: the new x, or a statement with \leftarrow if another field is set.

Besides the arguments of its piece a formula may read `signal`: "row" or "token", the rank of x; `weighted`: "True" if
an earlier piece has set weights; `first`: "True" if there is no earlier piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from funrl.algos.notation import CLIP, Formula, cases, policy_of, power, with_number

OLD = r"\pi_{\mathrm{old}}"
ROLLOUT = r"\pi_{\mathrm{rollout}}"
GAP = rf"\frac{{{OLD}(t)}}{{{ROLLOUT}(t)}}"
GAPS = {  # ratios of corrections, trainer over engine
    "token": GAP,
    "sequence": rf"\exp(\sum_t \log {GAP})",
    "geometric": rf"\exp(\operatorname{{mean}}_t \log {GAP})",
}
NON_ARITHMETIC = ("resample_rows",)  # pieces that are described by a sentence


def _kl(estimate: str, first: str, second: str) -> str:
    return rf"{estimate}({first} \| {second})"


def _of_signal(a: Mapping[str, Any]) -> str:
    return "x_t" if a["signal"] == "token" else "x_i"


def _kl_in_reward(a: Mapping[str, Any]) -> str:
    kl = _kl(a["estimate"], OLD, r"\pi_{\mathrm{ref}}")
    summed = kl if a["signal"] == "token" else rf"\sum_t {kl}"
    return f"{_of_signal(a)} - {with_number(a['controller'], summed)}"


def _adaptive_kl(a: Mapping[str, Any]) -> str:
    mean = rf"\frac{{\operatorname{{mean}}(\operatorname{{KL}})}}{{{a['kl_target']}}}"
    moved = rf"1 + {CLIP}({mean} - 1, -0.2, 0.2) \frac{{\mathrm{{rows}}}}{{{a['horizon']}}}"
    return rf"\beta ; \beta = {a['kl_coef']} \operatorname{{at\ first}}, \operatorname{{then}} \beta ({moved})"


def _gae(a: Mapping[str, Any]) -> str:
    gamma = a["gamma"]
    decay = a["gae_lambda"]
    critic = a.get("critic_lambda")
    next_value = with_number(gamma, "V_{t+1}")

    def discounted(factor: str) -> str:
        if factor == "0":
            return r"\delta_t"
        base = factor if gamma == "1" else gamma if factor == "1" else rf"({gamma} \cdot {factor})"
        return rf"\sum_{{k \geq t}} {power(base, 'k - t')} \delta_k"

    target = "" if critic is None else f" ; R_t = V_t + {discounted(critic)}"
    return rf"{discounted(decay)} ; \delta_t = x_t + {next_value} - V_t{target}"


def _reward_to_go(a: Mapping[str, Any]) -> str:
    return rf"\sum_{{k \geq t}} {power(a['gamma'], 'k - t')} x_k".replace("  ", " ")


def _to_turns(a: Mapping[str, Any]) -> str:
    return rf"\sum_{{k \geq \mathrm{{turn}}(t)}} {power(a['gamma'], 'k - turn(t)')} x_k".replace("  ", " ")


def _turn_gae(a: Mapping[str, Any]) -> str:
    gamma = a["gamma"]
    base = a["gae_lambda"] if gamma == "1" else rf"({gamma} \cdot {a['gae_lambda']})"
    delta = rf"\delta_k = x_k + {with_number(gamma, 'V_{k+1}')} - V_k"
    return rf"\sum_{{j \geq k}} {power(base, 'j - k')} \delta_j ; {delta} ; k = \mathrm{{turn}}(t)"


def _step_groups(a: Mapping[str, Any]) -> str:
    returns = rf"R_k = \sum_{{j \geq k}} {power(a['gamma'], 'j - k')} r_j".replace("  ", " ")
    centred = r"R_k - \operatorname{mean}_{\mathrm{state}}(R)"
    if a["eps"] is not None:
        centred = rf"\frac{{{centred}}}{{\operatorname{{std}}_{{\mathrm{{state}}}}(R) + {a['eps']}}}"
    return rf"x_i + {with_number(a['weight'], f'({centred})')} ; {returns} ; k = \mathrm{{turn}}(t)"


def _batch_scale(a: Mapping[str, Any]) -> str:
    rows = "" if a["alone"] == "True" else r"_{|G| > 1}"
    return rf"\frac{{x_i}}{{\operatorname{{std}}{rows}(x) + {a['eps']}}}"


def _weights(a: Mapping[str, Any]) -> tuple[str, str]:
    if a.get("weights") is None:
        return "", ""
    return "w_k ", f" ; w = ({a['weights']})"


def _decoupled_groups(a: Mapping[str, Any]) -> str:
    factor, definition = _weights(a)
    centred = r"\mathrm{score}_{i,k} - \operatorname{mean}_G(\mathrm{score}_k)"
    if a["deviation"] == "True":
        term = rf"\frac{{{centred}}}{{\operatorname{{std}}_G(\mathrm{{score}}_k) + {a['eps']}}}"
    else:
        term = f"({centred})"
    shaped = "" if a["first"] == "True" else r" + x_i - \mathrm{score}_i - \operatorname{mean}_G(x - \mathrm{score})"
    return rf"\sum_k {factor}{term}{shaped}{definition}"


def _weighted_scores(a: Mapping[str, Any]) -> str:
    factor, definition = _weights(a)
    return rf"\sum_k {factor}\mathrm{{score}}_{{i,k}}{definition}"


def _best_of_group(a: Mapping[str, Any]) -> str:
    lead = r"\max(0, x_i - \max_{j \in G, j \neq i}(x_j))"
    return lead if a.get("eps") is None else rf"\frac{{{lead}}}{{\operatorname{{std}}_G(x) + {a['eps']}}}"


def _group_log_ratio(a: Mapping[str, Any]) -> str:
    log_ratio = rf"\sum_t \log \frac{{{OLD}(t)}}{{{policy_of(a['against'])}(t)}}"
    mean = rf"\operatorname{{mean}}_G({log_ratio})"
    return f"x_i + {with_number(a['beta'], mean)}"


def _clip_reward(a: Mapping[str, Any]) -> str:
    return rf"{CLIP}({_of_signal(a)}, {a['low']}, {a['high']})"


def _overlong_penalty(a: Mapping[str, Any]) -> str:
    beyond = rf"\frac{{\max(0, |o_i| - ({a['limit']} - {a['buffer']}))}}{{{a['buffer']}}}"
    return f"x_i - {with_number(a['factor'], beyond)}"


def _stop_properly(a: Mapping[str, Any]) -> str:
    negative = a["coefficient"].startswith("-")
    instead = a["coefficient"] if negative else with_number(a["coefficient"], "x_i")
    return cases((instead, r"\mathrm{row\ i\ was\ cut\ off}"), rest="x_i")


def _optimal_token_baseline(a: Mapping[str, Any]) -> str:
    factor = "w_k^2 " if a["weighted"] == "True" else ""
    norm = rf"(1 - 2 \cdot {OLD}(k) + \sum_v {OLD}(v)^2)"
    total = r"\sum_{j \in G} W_{j,t}"
    baseline = rf"\frac{{{total} x_{{j,t}}}}{{{total}}}"
    return rf"x_t - {baseline} ; W_t = \sum_{{k \leq t}} {factor}{norm}"


def _implicit_rewards(a: Mapping[str, Any]) -> str:
    others = r"\operatorname{mean}_{j \in G, j \neq i}(\operatorname{mean}_t(q_{j,t}))"
    ratio = r"\log \frac{\pi_{\mathrm{implicit}}(t)}{\pi_{\mathrm{ref}}(t)}"
    added = with_number(a["coefficient"], f"(q_t - {others})") if a["coefficient"] != "1" else f"q_t - {others}"
    return f"x_t + {added} ; q_t = {with_number(a['beta'], ratio)}"


def _teacher_advantage(a: Mapping[str, Any]) -> str:
    kl = _kl(a["estimate"], OLD, r"\pi_{\mathrm{teacher}}")
    return f"x_t - {kl}" if a["signal"] == "token" else f"-{kl}"


def _weigh_demonstrations(a: Mapping[str, Any]) -> str:
    peak, valley, warmup, decay = (a[name] for name in ("peak", "valley", "warmup", "decay"))
    after = r"\mathrm{step}" if warmup == "0" else rf"\mathrm{{step}} - {warmup}"
    wave = rf"\cos(180^{{\circ}} \min(1, \frac{{{after}}}{{{decay}}}))"
    mu = valley if decay == "0" else rf"{valley} + ({peak} - {valley}) \frac{{1 + {wave}}}{{2}}"
    if warmup != "0":
        mu = cases((rf"{peak} \frac{{\mathrm{{step}}}}{{{warmup}}}", rf"\mathrm{{step}} < {warmup}"), rest=mu)
    imitated, sampled = (r"\mu w_t", r"(1 - \mu) w_t") if a["weighted"] == "True" else (r"\mu", r"1 - \mu")
    weight = cases((imitated, r"\mathrm{demonstrated}"), rest=sampled)
    signal = cases(("0", r"\mathrm{demonstrated}"), rest="x_t")
    return rf"{signal} ; w_t \leftarrow {weight} ; \mu = {mu}"


def _importance_weights(a: Mapping[str, Any]) -> str:
    own = "w_t " if a["weighted"] == "True" else ""
    return rf"w_t \leftarrow {own}{CLIP}({GAPS[a['over']]}, {a['low']}, {a['high']})"


def _kept(a: Mapping[str, Any], condition: str) -> str:
    """The mask restricted to a condition; with `in_denominator` the weight instead."""
    held = rf"\mathbf{{1}}[{condition}]"
    if a.get("in_denominator", "False") != "True":
        return rf"m_t \leftarrow m_t {held}"
    return rf"w_t \leftarrow {'w_t ' if a['weighted'] == 'True' else ''}{held}"


def _reject_ratio(a: Mapping[str, Any]) -> str:
    return _kept(a, rf"{a['low']} \leq {GAPS[a['over']]} \leq {a['high']}")


def _reject_divergence(a: Mapping[str, Any]) -> str:
    kl = _kl(rf"\operatorname{{KL}}_{{{a['kind']}}}", ROLLOUT, OLD)
    over = {"token": kl, "sum": rf"\sum_t {kl}", "mean": rf"\operatorname{{mean}}_t {kl}", "max": rf"\max_t {kl}"}
    return _kept(a, rf"{over[a['over']]} \leq {a['high']}")


def _reject_second_moment(a: Mapping[str, Any]) -> str:
    harmful = a["harmful"] == "True"
    dropped = r"d_t^2 > v \operatorname{and} d_t x_t > 0" if harmful else "d_t^2 > v"
    counted = r"d_t^2 \leq u, d_t x_t > 0" if harmful else r"d_t^2 \leq u"
    largest = rf"\operatorname{{largest}}(u : \operatorname{{mean}}_{{{counted}}}(d_t^2) \leq {a['high']})"
    return rf"m_t \leftarrow m_t (1 - \mathbf{{1}}[{dropped}]) ; d_t = \log {GAP} ; v = {largest}"


COVARIANCE = rf"c_t = (x_t - \operatorname{{mean}}(x)) (\log {OLD}(t) - \operatorname{{mean}}(\log {OLD}))"


def _adapt_entropy(a: Mapping[str, Any]) -> str:
    short = rf"\operatorname{{mean}}(H({OLD})) \leq {a['target']}"
    moved = [rf"{CLIP}(c {sign} {a['step']}, {a['low']}, {a['high']})" for sign in "+-"]
    after = (
        rf"c = {a['start']} \operatorname{{at\ first}}, \operatorname{{then}} {cases((moved[0], short), rest=moved[1])}"
    )
    return rf"c_{{\mathrm{{ent}}}} \leftarrow c \mathbf{{1}}[{short}] ; {after}"


STEPS: dict[str, Formula] = {  # the result of a piece of an advantage chain
    # on rows
    "group_center": r"x_i - \operatorname{mean}_G(x)",
    "group_scale": r"\frac{x_i}{\operatorname{std}_G(x) + <eps>}",
    "batch_center": r"x_i - \operatorname{mean}(x)",
    "batch_scale": _batch_scale,
    "constant_baseline": "x_i - <value>",
    "relative_to_mean": cases(
        (r"\frac{x_i - \operatorname{mean}_G(x)}{\operatorname{mean}_G(x)}", r"\operatorname{mean}_G(x) > 0"), rest="0"
    ),
    "optimal_value_baseline": r"x_i - <beta> \log \operatorname{mean}_G(\exp(\frac{x}{<beta>}))",
    "group_log_ratio": _group_log_ratio,
    "class_sizes": (
        cases(("0", "n_+ n_- = 0"), ("n_+", "x_i > 0"), rest="-n_-")
        + r" ; n_+ = \sum_{j \in G} \mathbf{1}[x_j > 0] ; n_- = \sum_{j \in G} \mathbf{1}[x_j \leq 0]"
    ),
    "leave_one_out": r"x_i - \operatorname{mean}_{j \in G, j \neq i}(x_j)",
    "length_weighted_center": r"x_i - \frac{\sum_{j \in G} |o_j| x_j}{\sum_{j \in G} |o_j|}",
    "greedy_baseline": r"x_i - x_{\mathrm{greedy}}",
    "win_rate": (
        r"\operatorname{mean}_{j \in G, j \neq i}(\mathbf{1}[x_i > x_j] + \frac{\mathbf{1}[x_i = x_j]}{2}) "
        r"- \frac{1}{2}"
    ),
    "informative_rescale": r"x_i \frac{\mathrm{rows}}{\mathrm{rows\ of\ groups\ with\ a\ signal}}",
    "best_of_group": _best_of_group,
    "weighted_scores": _weighted_scores,
    "decoupled_groups": _decoupled_groups,
    "clip_reward": _clip_reward,
    "running_normalise": (
        r"\frac{x_i - \operatorname{mean}_{\mathrm{run}}(x)}{\sqrt{\operatorname{var}_{\mathrm{run}}(x) + <eps>}}"
    ),
    "overlong_penalty": _overlong_penalty,
    "stop_properly": _stop_properly,
    "keep_best": (
        r"\mathbf{1}[x_i = \operatorname{max}_G(x) \operatorname{and} x_i > <threshold>] ; m_t \leftarrow m_t x_i"
    ),
    # from rows to tokens
    "to_tokens": r"x_i \operatorname{at\ every\ sampled\ token}",
    "to_turns": _to_turns,
    "to_last_token": r"x_i \operatorname{at\ the\ last\ sampled\ token}, 0 \operatorname{elsewhere}",
    "teacher_advantage": _teacher_advantage,
    "reference_point": (
        r"z \leftarrow \max(0, \operatorname{mean}_{\mathrm{mismatched}}(\sum_t "
        r"\log \frac{\pi_{\mathrm{old}}(t)}{\pi_{\mathrm{ref}}(t)}))"
    ),
    # on tokens
    "kl_in_reward": _kl_in_reward,
    "fixed_kl": "<kl_coef>",
    "adaptive_kl": _adaptive_kl,
    "whiten": r"\frac{x_t - \operatorname{mean}(x)}{\sqrt{\operatorname{var}(x) + <eps>}}",
    "reward_to_go": _reward_to_go,
    "gae": _gae,
    "turn_gae": _turn_gae,
    "step_groups": _step_groups,
    "turn_relative": (
        r"\frac{r_{i,k} - \operatorname{mean}_G(r_k)}{\operatorname{std}_G(r_k) + <eps>} + <outcome_weight> x_i"
        r" \operatorname{before\ the\ last\ turn}, x_i \operatorname{in\ it}"
    ),
    "hierarchical_center": (
        r"x_i - \operatorname{mean}_P(x) ; P = \mathrm{same\ agent\ of\ the\ group\ if\ agent} < <proposers>,"
        r" \mathrm{else\ others\ of\ the\ episode}"
    ),
    "role_baseline": r"x_i - b_{\mathrm{agent}} ; b \leftarrow <decay> b + (1 - <decay>) x_i",
    "turn_length_penalty": lambda a: (
        rf"{_of_signal(a)} - {with_number(a['factor'], '')}\sum_k \max(0, "
        rf"\frac{{n_k - ({a['limit']} - {a['buffer']})}}{{{a['buffer']}}})"
    ),
    "learn_observations": r"m_t \leftarrow 1 \operatorname{on\ what\ tools\ wrote}",
    "turn_center": r"x_{i,k} - \operatorname{mean}_G(x_k) ; k = \mathrm{turn}(t)",
    "length_adaptive": r"\lambda_i ; \lambda_i = \max(0, 1 - \frac{1}{<alpha> |o_i|})",
    "optimal_token_baseline": _optimal_token_baseline,
    "implicit_rewards": _implicit_rewards,
    # other fields that are set
    "label_outcomes": r"y_t \leftarrow \mathrm{score}_i",
    "mark_positives": r"\mathrm{imitated}_t \leftarrow \mathbf{1}[\mathrm{score}_i > <threshold>]",
    "weigh_demonstrations": _weigh_demonstrations,
    "importance_weights": _importance_weights,
    "normalise_weights": r"w_t \leftarrow \frac{w_t}{\operatorname{mean}(w)}",
    "reject_ratio": _reject_ratio,
    "reject_divergence": _reject_divergence,
    "reject_second_moment": _reject_second_moment,
    "mask_truncated": lambda a: _kept(a, r"\mathrm{row\ i\ was\ not\ cut\ off}"),
    "select_covariance_between": (
        rf"\mathrm{{selected}} \leftarrow \operatorname{{draw}}_{{<share>}}(t : <low> < c_t < <high>) ; {COVARIANCE}"
    ),
    "select_highest_covariance": rf"\mathrm{{selected}} \leftarrow \operatorname{{top}}_{{<share>}}(c) ; {COVARIANCE}",
    "keep_highest_entropy": lambda a: (
        rf"w_t \leftarrow {'w_t ' if a['weighted'] == 'True' else ''}\mathbf{{1}}[H({OLD}) \geq "
        rf"\operatorname{{quantile}}_{{1 - {a['share']}}}(H({OLD}))]"
    ),
    "adapt_entropy": _adapt_entropy,
}
TO_TOKENS = (
    "to_tokens",
    "to_turns",
    "step_groups",
    "turn_relative",
    "to_last_token",
    "teacher_advantage",
    "reference_point",
)  # after these x is per token
