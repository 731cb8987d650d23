r"""Symbols and helpers that the formulas of losses and of advantage steps share.

Formulas are LaTeX, keyed by the name of the function that makes the piece: `notation_losses.FORMULAS` for parts of a
loss, `notation_chains.STEPS` for steps of an advantage chain. `<name>` stands for an argument of the piece: a number,
or the formula of another piece. A formula that needs more logic is a function of the arguments. Definitions of symbols
follow " ; ".

A fraction or a number multiplies what follows it; \sum, \prod, \operatorname{mean}_t reach to the next + or -.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Formula = str | Callable[[Mapping[str, Any]], str]

CLIP = r"\operatorname{clip}"
LOG_PI = r"\log \pi(t)"
LOG_REF_RATIO = r"\log \frac{\pi(t)}{\pi_{\mathrm{ref}}(t)}"
OTHERS = {
    "ref_logp": r"\mathrm{ref}",
    "old_logp": r"\mathrm{old}",
    "rollout_logp": r"\mathrm{rollout}",
    "teacher_logp": r"\mathrm{teacher}",
}

MEANINGS = {  # symbols that a formula may leave undefined, as LaTeX: their meaning
    r"x_i": "the score of row i, as transformed by the pieces so far",
    r"x_t": "the same at token t, once the pieces have spread it over tokens",
    r"\mathrm{score}_": "score is the original score, of row i or of reward function k on it",
    r"w_k": "the weight of reward function k",
    r"m_t": "1 where token t is trained on, else 0; a sum over the tokens of a row is over these",
    r"A_t": "the advantage of token t",
    r"w_t": "the weight of token t, from the advantage chain",
    r"r_t": "pi(t) / pi_old(t), the probability of token t under the policy over that before the update",
    r"\rho_t": "rho_t is pi(t) / pi_rollout(t), the probability of token t under the policy over the engine's",
    r"\pi(t)": "pi(t) is the probability of token t under the policy",
    r"\sum_t": "sum_t, mean_t: over the sampled tokens of the sequence",
    r"\operatorname{mean}_t": "sum_t, mean_t: over the sampled tokens of the sequence",
    r"\mathrm{top}": "top: the teacher's most probable tokens",
    r"s_i": "exp(mean_t log r_t), the length-normalised ratio of the sequence",
    r"p_i": "the product of r_t over the tokens of the sequence",
    r"h_w": "the reward of the chosen completion (w) and of the rejected one (l), in nats",
    r"X_t": "the number of the reward head at token t",
    r"y_t": "the label of token t, 0 to 1",
    r"y_i": "the label of row i, 0 to 1",
    r"\mathrm{desirable}": "desirable: sequences whose label is above 1/2",
    r"X_w": "the number of the reward head for the chosen completion (w) and for the rejected one (l)",
    r"u_w": "u of the chosen completion (w) and of the rejected one (l)",
    r"m_w": "m of the chosen completion (w) and of the rejected one (l)",
    r"o_w": "o_w is the chosen completion of a pair, o_l the rejected one",
    r"_{(i)}": "u_(i), v_(i): the i-th smallest among the pairs",
    r"\mathrm{demonstrated}": "demonstrated: token t is of a demonstration",
    r"\mathrm{mismatched}": "mismatched: rows of completions to other prompts than their own",
    r"x_{\mathrm{greedy}}": "x_greedy is the score of a greedy completion of the same prompt",
    r"z": "KTO's reference point",
    r"c_{\mathrm{ent}}": "c_ent is the coefficient that adapt_entropy has set",
    r"\operatorname{dual}": "dual_c(y) is min(y, -c A_t) where A_t < 0, else y",
    r"\operatorname{sg}": "sg(y) is y without its gradient",
    r"\mathbf{1}[": "1[c] is 1 where c holds, else 0",
    r"\pi_{\mathrm{ref}}": "pi_ref is the reference policy",
    r"\pi_{\mathrm{old}}": "pi_old is the trainer's policy before the update",
    r"\pi_{\mathrm{rollout}}": "pi_rollout is the policy of the engine that sampled",
    r"\pi_{\mathrm{teacher}}": "pi_teacher is the teacher",
    r"\pi_{\mathrm{implicit}}": "pi_implicit is the implicit reward model",
    r"\operatorname{KL}_{k1}": "KL_k1(p || q) is -d with d = log q - log p at the sampled token",
    r"\operatorname{KL}_{k2}": "KL_k2(p || q) is d^2 / 2 with d = log q - log p at the sampled token",
    r"\operatorname{KL}_{k3}": "KL_k3(p || q) is exp(d) - 1 - d with d = log q - log p at the sampled token",
    r"\operatorname{KL}_{abs}": "KL_abs(p || q) is |d| with d = log q - log p at the sampled token",
    r"\operatorname{KL}_{k1+}": "KL_k1+(p || q) is -d, d = log q - log p at the sampled token, with the gradient of k2",
    r"\operatorname{KL}_{k3+}": "KL_k3+(p || q) is exp(d) - 1 - d, d = log q - log p, with the gradient of k2",
    r"\operatorname{KL}_{k2+}": "KL_k2+(p || q) is d^2 / 2 with d = log q - log p at the sampled token",
    r"\operatorname{KL}_{abs+}": "KL_abs+(p || q) is |d|, d = log q - log p, with the gradient of k2",
    r"H(": "H is the entropy of a policy at token t, in nats",
    r"\operatorname{KL}(": "KL is over the whole vocabulary",
    r"\sigma(": "sigma is the logistic function",
    r"|o_i|": "|o_i| is the number of sampled tokens of sequence i",
    r"n": "n is the number of sequences that have a sampled token",
    "_G(": "mean_G, std_G, max_G: over the rows of the group",
    r"\in G": "G is the group of row i: the rows of its prompt",
    r"\operatorname{mean}(": "mean, std, var without an index: over all rows, or all sampled tokens, of the batch",
    r"\operatorname{std}(": "mean, std, var without an index: over all rows, or all sampled tokens, of the batch",
    r"V_t": "V_t is the critic's value at token t, V_old its value before the update",
    r"R_t": "R_t is the critic's target: the advantage of gae, with its critic_lambda, plus the value",
    r"\mathrm{chosen}": "chosen: the tokens of chosen completions",
    r"\mathrm{compared}": "compared: the tokens of the pair in a triple",
    r"\mathrm{gold}": "gold: the tokens of the third text of a triple",
    r"\mathrm{imitated\ tokens}": "imitated tokens: those that mark_positives has marked",
    r"\mathrm{demonstrated\ tokens}": "demonstrated tokens: those of demonstrations",
    r"\mathrm{sampled\ tokens}": "sampled tokens: those outside demonstrations",
}


def cases(*pairs: tuple[str, str], rest: str) -> str:
    """Values with their conditions; the first condition that holds decides, `rest` if none does."""
    parts = [rf"{value} \operatorname{{where}} {condition}" for value, condition in pairs]
    return ", ".join([*parts, rf"\operatorname{{else}} {rest}"])


def with_number(factor: Any, text: str) -> str:
    """A number times a formula; a factor of 1 is left out."""
    return text if str(factor) == "1" else f"{factor} {text}"


def power(base: str, exponent: str) -> str:
    """A number to a power; "" where the number is 1."""
    return "" if base == "1" else rf"{base}^{{{exponent}}}"


def ratio_to(sampled_by: Any) -> str:
    """The token ratio to the policy whose log-probabilities a field holds."""
    return r"\rho_t" if sampled_by == "rollout_logp" else "r_t"


def policy_of(field: Any) -> str:
    """The policy whose log-probabilities a field holds."""
    name = OTHERS.get(str(field), r"\mathrm{other}")
    return rf"\pi_{{{name}}}"


def is_sum(text: str) -> bool:
    """True if a formula is a sum or begins with a sign, so that a factor before it needs brackets."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in "({[") - (letter in ")}]")
        if letter in "+-" and depth == 0 and (place == 0 or text[place - 1] == " "):
            return True
    return False


def with_factor(factor: str, text: str) -> str:
    """A factor times a formula; a minus sign of a product comes first."""
    if text.startswith("-") and not is_sum(text[1:]):
        return f"-{factor} {text[1:]}"
    return f"{factor} {grouped(text)}"


def grouped(text: str) -> str:
    """A formula as a factor: in brackets if it is a sum."""
    return rf"\left( {text} \right)" if is_sum(text) else text


def occurs(symbol: str, formula: str) -> bool:
    """True if a symbol occurs in a formula; a letter must stand alone, not within a word or a command."""
    if not re.fullmatch(r"\w|\w_\w", symbol):
        return symbol in formula
    bare = re.sub(r"\\(operatorname|mathrm|mathcal|mathbf)\{[^{}]*\}|\\[a-zA-Z]+", " ", formula)
    return re.search(rf"(?<![\w\\]){symbol}(?![\w(])", bare) is not None
