r"""Formulas of the parts of a loss: terms, ratios, losses and rewards of pairs, reductions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from funrl.algos.notation import (
    CLIP,
    LOG_PI,
    LOG_REF_RATIO,
    Formula,
    cases,
    grouped,
    policy_of,
    ratio_to,
    with_factor,
    with_number,
)

SIGMA_D = r"\sigma(<beta> (h_w - h_l))"
SIGMA_MINUS_D = r"\sigma(-<beta> (h_w - h_l))"


# ---- terms, per token


def _clipped_surrogate(a: Mapping[str, Any]) -> str:
    ratio = a["ratio"]
    unclipped = ratio if a.get("delta") is None else rf"\min({ratio}, {a['delta']})"
    bound = rf"-\min({unclipped} A_t, {CLIP}({ratio}, 1 - {a['clip_low']}, 1 + {a['clip_high']}) A_t)"
    return bound if a.get("dual_clip") is None else rf"\operatorname{{dual}}_{{{a['dual_clip']}}}({bound})"


def _clipped_importance(a: Mapping[str, Any]) -> str:
    low = "0" if a.get("clip_low") is None else f"1 - {a['clip_low']}"
    return rf"-A_t \operatorname{{sg}}({CLIP}({a['ratio']}, {low}, 1 + {a['clip_high']})) {LOG_PI}"


def _masked_importance(a: Mapping[str, Any]) -> str:
    ratio = ratio_to(a["sampled_by"])
    inside = rf"1 - {a['clip_low']} < {ratio} < 1 + {a['clip_high']}"
    return rf"-A_t \operatorname{{sg}}({ratio} \mathbf{{1}}[{inside}]) {LOG_PI}"


def _tapered(a: Mapping[str, Any]) -> str:
    weight = cases(("1", r"A_t \geq 0"), rest=rf"\min({a['ratio']}, 1)")
    return rf"-A_t \operatorname{{sg}}(c_t) {LOG_PI} ; c_t = {weight}"


def _soft_gate(a: Mapping[str, Any]) -> str:
    tau = cases((a["positive"], "A_t > 0"), rest=a["negative"])
    return rf"-\frac{{4 A_t \sigma(\tau ({a['ratio']} - 1))}}{{\tau}} ; \tau = {tau}"


def _divergence_mask(a: Mapping[str, Any]) -> str:
    ratio = ratio_to(a["sampled_by"])
    sampler = rf"{policy_of(a['sampled_by'])}(t)"
    text = rf"-A_t \operatorname{{sg}}(\min({ratio}, {a['cap']}) \mathbf{{1}}[\mathrm{{near}}]) {LOG_PI} ; "
    if a["kind"] == "tv":
        moved = rf"\pi(t) - {sampler}"
        rising = rf"{moved} \leq {a['above']}"
        falling = rf"{moved} \geq -{a['below']}"
        return text + rf"\mathrm{{near}} = {cases((rising, 'A_t > 0'), rest=falling)}"
    rising = rf"D_t \leq {a['above']} \operatorname{{or}} \pi(t) \leq {sampler}"
    falling = rf"D_t \leq {a['below']} \operatorname{{or}} \pi(t) \geq {sampler}"
    divergence = (
        rf"{sampler} \log \frac{{{sampler}}}{{\pi(t)}} + (1 - {sampler}) \log \frac{{1 - {sampler}}}{{1 - \pi(t)}}"
    )
    return text + rf"\mathrm{{near}} = {cases((rising, 'A_t > 0'), rest=falling)} ; D_t = {divergence}"


def _direct_reward(a: Mapping[str, Any]) -> str:
    return rf"\frac{{{a['beta']}}}{{2}} (\log r_t)^2 - A_t {LOG_PI}"


def _geometric_mean(a: Mapping[str, Any]) -> str:
    rising = rf"\min(\log r_t, {a['clip_high']})"
    falling = rf"\max(\log r_t, -{a['clip_low']})"
    log_ratio = cases((rising, "A_t > 0"), (falling, "A_t < 0"), rest="0")
    return rf"-\operatorname{{mean}}_t(A_t) \exp(\operatorname{{mean}}_t d_t) ; d_t = {log_ratio}"


def _gamma_weighted(a: Mapping[str, Any]) -> str:
    k, c = a["positive"].split(", ")
    other_k, other_c = a["negative"].split(", ")
    log_weight = rf"\sum_t \log {ratio_to(a['sampled_by'])}"
    good = r"A_t \geq 0"
    return (
        rf"-A_t \operatorname{{sg}}(W^k \exp(c (1 - W))) {LOG_PI} ; W = \exp({log_weight}) ; "
        f"k = {cases((k, good), rest=other_k)} ; c = {cases((c, good), rest=other_c)}"
    )


def _self_play_regression(a: Mapping[str, Any]) -> str:
    target = with_number(a["eta"], r"\operatorname{mean}_t(A_t)")
    return rf"(\sum_t \log r_t - {target})^2"


def _log_ratio_regression(a: Mapping[str, Any]) -> str:
    against = a["against"]
    log_ratio = r"\log r_t" if against == "old_logp" else rf"\log \frac{{\pi(t)}}{{{policy_of(against)}(t)}}"
    reward = with_number(a["beta"], rf"\sum_t {log_ratio}")
    return rf"({reward} - \operatorname{{mean}}_t(A_t))^2"


def _classification(a: Mapping[str, Any]) -> str:
    odds = rf"-\operatorname{{sign}}(c) \frac{{\log(s_i)}}{{{a['tau']}}}"
    return rf"\log(|c| + \exp({odds})) ; c = \operatorname{{mean}}_t(A_t)"


def _future_weighted(a: Mapping[str, Any]) -> str:
    counted = "" if a.get("most_ratio") is None else rf" \mathbf{{1}}[r_k \leq {a['most_ratio']}]"
    future = rf"\sum_{{k \geq t}} 2^{{-(k - t) / {a['half_life']}}} \log r_k{counted}"
    weight = rf"{CLIP}(\exp(F_t), 1 - {a['low']}, 1 + {a['high']})"
    weighed = with_factor(r"\operatorname{sg}(f_t)", a["term"])
    if a.get("safe_ratio") is None:
        definition = f"f_t = {weight}"
    else:
        safe = rf"A_t < 0 \operatorname{{and}} r_t > {a['safe_ratio']}"
        bounded = cases((r"\min(g_t, 1)", safe), rest="g_t")
        definition = f"f_t = {bounded} ; g_t = {weight}"
    return f"{weighed} ; {definition} ; F_t = {future}"


def _mask_off_policy(a: Mapping[str, Any]) -> str:
    log_ratio = rf"\log {ratio_to(a['sampled_by'])}"
    near = rf"A_t \geq 0 \operatorname{{or}} -\operatorname{{mean}}_t({log_ratio}) \leq {a['threshold']}"
    return rf"{grouped(a['term'])} \mathbf{{1}}[{near}]"


def _entropy_gated_likelihood(a: Mapping[str, Any]) -> str:
    gate = rf"\min(\frac{{H(\pi_t)}}{{{a['scale']}}}, 1)"
    raised = gate if a["alpha"] == "1" else rf"{gate}^{{{a['alpha']}}}"
    return rf"-\operatorname{{sg}}({raised}) {LOG_PI}"


def _kl_to(a: Mapping[str, Any]) -> str:
    return rf"{a['estimate']}(\pi \| {policy_of(a['field'])})"


def _kl_estimate(a: Mapping[str, Any]) -> str:
    if "value" in a:  # a kind with "+" has the gradient of another kind
        return a["value"].removesuffix("}") + "+}"
    return rf"\operatorname{{KL}}_{{{a['kind']}}}"


def divergence_between(beta: float, temperature: float, role: str) -> str:
    """Formula of a `Divergence`; the arguments are its fields."""
    anchor = rf"\pi_{{\mathrm{{{'ref' if role == 'reference' else role}}}}}"
    definition = "" if temperature == 1 else rf" ; \mathrm{{temperature}} = {temperature:g}"

    def kl(first: str, second: str) -> str:
        return rf"\operatorname{{KL}}({first} \| {second})_t"

    if beta in (0, 1):
        return (kl(anchor, r"\pi") if beta == 0 else kl(r"\pi", anchor)) + definition
    mixed = f"{beta:g} {kl(anchor, 'M')} + {1 - beta:g} " + kl(r"\pi", "M")
    return rf"{mixed} ; M = {beta:g} {anchor} + {1 - beta:g} \pi{definition}"


def _forward_kl_topk(a: Mapping[str, Any]) -> str:
    teacher = r"\pi_{\mathrm{teacher}}(k)"
    top = rf"\sum_{{k \in \mathrm{{top}}}} {teacher} \log \frac{{{teacher}}}{{\pi(k)}}"
    if a["rest"] != "True":
        return top
    rests = rf"p = 1 - \sum_{{k \in \mathrm{{top}}}} {teacher} ; q = 1 - \sum_{{k \in \mathrm{{top}}}} \pi(k)"
    return rf"{top} + p \log \frac{{p}}{{q}} ; {rests}"


def _clipped_value_loss(a: Mapping[str, Any]) -> str:
    clip = a.get("value_clip")
    if clip is None:
        return r"\frac{(V_t - R_t)^2}{2}"
    near = rf"{CLIP}(V_t, V_{{\mathrm{{old}}}} - {clip}, V_{{\mathrm{{old}}}} + {clip})"
    return rf"\frac{{\max((V_t - R_t)^2, ({near} - R_t)^2)}}{{2}}"


def _kto_loss(a: Mapping[str, Any]) -> str:
    baseline = " - z" if a.get("baseline") != "False" else ""
    desirable = r"\mathrm{desirable}"
    sign = cases(("1", desirable), rest="-1")
    weight = cases((a["desirable"], desirable), rest=a["undesirable"])
    weighs = (a["desirable"], a["undesirable"]) != ("1", "1")
    gain = rf"1 - \sigma({with_number(a['beta'], 'b')} (h{baseline}))"
    loss = f"w ({gain}) ; w = {weight}" if weighs else gain
    return rf"{loss} ; b = {sign} ; h = \sum_t {LOG_REF_RATIO}"


def _pairwise_reward(a: Mapping[str, Any]) -> str:
    margin = r" - \mathrm{margin}" if a.get("margin") == "True" else ""
    center = "" if a.get("center") in (None, "0") else f" + {with_number(a['center'], '(X_w + X_l)^2')}"
    return rf"-\log \sigma(X_w - X_l{margin}){center}"


# ---- ratios and reductions


def _sequence_ratio(a: Mapping[str, Any]) -> str:
    symbol = "s" if a["mean"] == "True" else "p"
    if a["per_token"] != "True":
        return f"{symbol}_i"
    return rf"{symbol}_t ; {symbol}_t = \operatorname{{sg}}({symbol}_i) \frac{{\pi(t)}}{{\operatorname{{sg}}(\pi(t))}}"


def _constant_mean(a: Mapping[str, Any]) -> str:
    return rf"\frac{{1}}{{{with_number(a['length'], 'n')}}} \sum_i \sum_{{t \in o_i}} <L>"


# ---- pairs


def _smoothed(logit: str, smoothing: Any) -> str:
    if smoothing in (None, "0"):
        return rf"-\log \sigma({logit})"
    return rf"-(1 - {smoothing}) \log \sigma({logit}) - {smoothing} \log \sigma(-({logit}))"


def _sigmoid_pairs(a: Mapping[str, Any]) -> str:
    margin = "" if a.get("margin") in (None, "0") else f" - {a['margin']}"
    return _smoothed(with_number(a["beta"], "(h_w - h_l)") + margin, a.get("smoothing"))


def _aot(a: Mapping[str, Any]) -> str:
    def log_ratio(above: str, below: str) -> str:
        return rf"\log \frac{{{above}}}{{{below}}}"

    policy = r"\pi"
    reference = r"\pi_{\mathrm{ref}}"
    if a["paired"] == "True":
        u, v = (log_ratio(f"{of}(o_w)", f"{of}(o_l)") for of in (policy, reference))
    else:
        u, v = (log_ratio(f"{policy}({of})", f"{reference}({of})") for of in ("o_w", "o_l"))
    return _smoothed(with_number(a["beta"], "(u_{(i)} - v_{(i)})"), a["smoothing"]) + f" ; u = {u} ; v = {v}"


def _preference(a: Mapping[str, Any]) -> str:
    loss = str(a["loss"])
    weighed = loss if a.get("weight") is None else with_factor(rf"\operatorname{{sg}}({a['weight']})", loss)
    return f"{weighed} ; h = {a['reward']}"


def _reference_log_ratio(a: Mapping[str, Any]) -> str:
    shortened = a["length_alpha"] != "1"
    mean = r"\operatorname{mean}_t" if a["per_token"] == "True" else r"\sum_t"
    log_u = rf"{mean} {'a_t ' if shortened else ''}{LOG_REF_RATIO}"
    alpha = a["divergence_alpha"]
    forms = {
        "reverse_kl": log_u,
        "forward_kl": r"-\frac{1}{u}",
        "js": r"\log \frac{2 u}{1 + u}",
        "alpha": rf"\frac{{1 - u^{{-{alpha}}}}}{{{alpha}}}",
    }
    ratio = "" if a["divergence"] == "reverse_kl" else rf" ; u = \exp({log_u})"
    common = r"\mathrm{t\ is\ within\ the\ length\ of\ the\ shorter\ completion\ of\ its\ pair}"
    return (
        forms[a["divergence"]]
        + ratio
        + (f" ; a_t = {cases(('1', common), rest=a['length_alpha'])}" if shortened else "")
    )


def _log_likelihood(a: Mapping[str, Any]) -> str:
    mean = r"\operatorname{mean}_t" if a["per_token"] == "True" else r"\sum_t"
    alpha = a.get("alpha")
    if alpha in (None, "0"):
        return f"{mean} {LOG_PI}"
    return rf"\frac{{1 - u^{{-{alpha}}}}}{{{alpha}}} ; u = \exp({mean} {LOG_PI})"


def _on_policy_weight(a: Mapping[str, Any]) -> str:
    weight = r"\exp(m_w + m_l)"
    bounded = weight if a.get("bound") is None else rf"\min({a['bound']}, {weight})"
    return rf"{bounded} ; m = \operatorname{{mean}}_t \log \frac{{\pi(t)}}{{\sum_v \pi_{{\mathrm{{old}}}}(v)^2}}"


FORMULAS: dict[str, Formula] = {
    # terms, per token
    "clipped_surrogate": _clipped_surrogate,
    "surrogate": "-<ratio> A_t",
    "policy_gradient": f"-A_t {LOG_PI}",
    "clipped_importance": _clipped_importance,
    "masked_importance": _masked_importance,
    "tapered": _tapered,
    "soft_gate": _soft_gate,
    "divergence_mask": _divergence_mask,
    "direct_reward": _direct_reward,
    "geometric_mean": _geometric_mean,
    "gamma_weighted": _gamma_weighted,
    "self_play_regression": _self_play_regression,
    "log_ratio_regression": _log_ratio_regression,
    "classification": _classification,
    "future_weighted": _future_weighted,
    "mask_off_policy": _mask_off_policy,
    "entropy_bonus": r"-<entropy_coef> H(\pi_t)",
    "adaptive_entropy_bonus": r"-c_{\mathrm{ent}} H(\pi_t)",
    "kl_to": _kl_to,
    "kl_estimate": _kl_estimate,
    "kl_to_reference": "<corrected>",
    "negative_log_likelihood": f"-{LOG_PI}",
    "dynamic_likelihood": rf"-\operatorname{{sg}}(\pi(t)) {LOG_PI}",
    "entropy_gated_likelihood": _entropy_gated_likelihood,
    "uncertain_likelihood": rf"-\operatorname{{sg}}(\pi(t) (1 - \pi(t))) {LOG_PI}",
    "divergence_to_teacher": "<divergence>",
    "forward_kl_topk": _forward_kl_topk,
    "clipped_value_loss": _clipped_value_loss,
    "preference": _preference,
    "aot": _aot,
    "odds_ratio": (
        r"-<beta> \log \sigma(\log \frac{u_w}{1 - u_w} - \log \frac{u_l}{1 - u_l}) ; "
        rf"u = \exp(\operatorname{{mean}}_t {LOG_PI})"
    ),
    "kto_loss": _kto_loss,
    "pairwise_reward": _pairwise_reward,
    "step_reward": r"-y_t \log \sigma(X_t) - (1 - y_t) \log \sigma(-X_t)",
    "on_tokens": lambda a: rf"{grouped(a['term'])} \mathbf{{1}}[{a['which']}]",
    "off_selected": r"t \notin \mathrm{selected}",  # argument of `on_tokens`
    "on_selected": r"t \in \mathrm{selected}",
    "entropy_above": r"H(\pi_t) > <threshold>",
    "probability_below": r"\pi(t) < <threshold>",
    # ratios
    "token_ratio": lambda a: ratio_to(a["sampled_by"]),
    "product_ratio": "p_i",
    "sequence_ratio": _sequence_ratio,
    # losses of pairs
    "sigmoid_pairs": _sigmoid_pairs,
    "hinge_pairs": r"\max(0, 1 - <beta> (h_w - h_l))",
    "ipo_pairs": r"(h_w - h_l - \frac{1}{2 \cdot <beta>})^2",
    "robust_pairs": (
        rf"\frac{{-(1 - <smoothing>) \log {SIGMA_D} + <smoothing> \log {SIGMA_MINUS_D}}}{{1 - 2 \cdot <smoothing>}}"
    ),
    "exo_pairs": (
        rf"p \log \frac{{p}}{{1 - <smoothing>}} + (1 - p) \log \frac{{1 - p}}{{<smoothing>}} ; p = {SIGMA_D}"
    ),
    "nca_pairs": r"-\log \sigma(<beta> h_w) - \frac{\log \sigma(-<beta> h_w) + \log \sigma(-<beta> h_l)}{2}",
    "bco_pairs": r"-\log \sigma(<beta> h_w) - \log \sigma(-<beta> h_l)",
    "sppo_pairs": r"(h_w - \frac{1}{2 \cdot <beta>})^2 + (h_l + \frac{1}{2 \cdot <beta>})^2",
    "apo_zero_pairs": r"1 - \sigma(<beta> h_w) + \sigma(<beta> h_l)",
    "apo_down_pairs": rf"\sigma(<beta> h_w) + 1 - {SIGMA_D}",
    "discopop_pairs": (
        rf"-(1 - g) \log {SIGMA_D} + g \exp(-<beta> (h_w - h_l)) ; g = \sigma(\frac{{<beta> (h_w - h_l)}}{{<tau>}})"
    ),
    "reference_log_ratio": _reference_log_ratio,
    "log_likelihood": _log_likelihood,
    "on_policy_weight": _on_policy_weight,
    # reductions of L
    "token_mean": r"\frac{1}{\sum_i |o_i|} \sum_i \sum_{t \in o_i} <L>",
    "token_sum": r"\sum_i \sum_{t \in o_i} <L>",
    "sequence_mean": r"\frac{1}{n} \sum_i \frac{1}{|o_i|} \sum_{t \in o_i} <L>",
    "constant_mean": _constant_mean,
    # losses that are not a term under a reduction
    "implicit_reward_loss": (
        r"\frac{1}{n} \sum_i \left[ -y_i \log \sigma(Q) - (1 - y_i) \log \sigma(-Q) \right] ; "
        r"Q = <beta> \sum_t \log \frac{\pi_{\mathrm{implicit}}(t)}{\pi_{\mathrm{ref}}(t)}"
    ),
}
INNER = ("kl_to", "kl_estimate")  # not public in `funrl.algos`, or made by other pieces only
