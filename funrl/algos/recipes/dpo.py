"""DPO and its family: the policy learns which of two completions is better, relative to a reference.

    DPO      dpo()                                  f-DPO    dpo(divergence="forward_kl")
    cDPO     dpo(smoothing=0.1)                     LD-DPO   dpo(length_alpha=0.5)
    IPO      dpo("ipo", per_token=True)             WPO      dpo(on_policy=True)
    RPO      dpo(likelihood_coef=1.0)               MPO      dpo("0.8*sigmoid+0.2*bco", likelihood_coef=1.0)

`simpo`, `cpo`, `orpo` and `alphapo` need no reference and are recipes of their own.

References: Rafailov et al., 2023, https://arxiv.org/abs/2305.18290; RPO, Pang et al., 2024,
  https://arxiv.org/abs/2404.19733.
verl: none in its main tree. TRL: DPOTrainer; its ipo takes the mean over tokens (`per_token`), loss_type=[sigmoid,sft]
  with loss_weights is `likelihood_coef` (once rpo_alpha), use_weighting `on_policy` with `weight_bound=None`.
"""

import inspect
import re
from typing import Any

from funrl.algos.core import Algorithm, add, reduce, scale, sum_losses
from funrl.algos.losses import pair_losses
from funrl.algos.losses.preference import aot, chosen_likelihood, on_policy_weight, preference, reference_log_ratio
from funrl.algos.losses.reductions import sequence_mean
from funrl.algos.terms import Term

PAIRS = {
    "sigmoid": pair_losses.sigmoid_pairs,
    "hinge": pair_losses.hinge_pairs,
    "ipo": pair_losses.ipo_pairs,
    "robust": pair_losses.robust_pairs,
    "exo": pair_losses.exo_pairs,
    "nca": pair_losses.nca_pairs,
    "bco": pair_losses.bco_pairs,
    "sppo": pair_losses.sppo_pairs,
    "apo_zero": pair_losses.apo_zero_pairs,
    "apo_down": pair_losses.apo_down_pairs,
    "discopop": pair_losses.discopop_pairs,
}
AOT = {"aot": True, "aot_unpaired": False}  # value: whether pairs are sorted as a whole
LOSSES = PAIRS | dict.fromkeys(AOT, aot)


def dpo(
    loss: str = "sigmoid",
    beta: float = 0.1,
    smoothing: float | None = None,
    margin: float | None = None,
    per_token: bool = False,
    divergence: str = "reverse_kl",
    divergence_alpha: float = 0.5,
    length_alpha: float = 1.0,
    on_policy: bool = False,
    likelihood_coef: float = 0.0,
    weight_bound: float | None = 1.0,
) -> Algorithm:
    """Direct preference optimisation and its family.

    Args:
      loss: sigmoid (DPO), hinge, ipo, robust, exo, nca, bco, sppo, apo_zero, apo_down, discopop, aot or
        aot_unpaired; or a weighted sum such as 0.8*sigmoid+0.2*bco. aot sorts the pairs of a micro-batch, aot_unpaired
        sorts chosen and rejected completions separately.
      beta: scale of the log-ratio, per nat.
      smoothing: probability that a label is wrong, for sigmoid, robust, exo and both aot; None: the loss's own.
      margin: target for beta times the difference of the rewards, for sigmoid; None: 0.
      per_token: take the mean over a completion's tokens instead of the sum, as IPO does.
      divergence: divergence that keeps the policy near its reference: reverse_kl (DPO), forward_kl, js or alpha.
      divergence_alpha: parameter of divergence alpha, above 0 and below 1.
      length_alpha: factor of the tokens beyond the length of the pair's shorter completion, 0 to 1; LD-DPO.
      on_policy: weight pairs by how likely the policy is to sample them itself; WPO.
      likelihood_coef: loss per nat of the chosen completions' negative log-likelihood; RPO.
      weight_bound: the largest weight of a pair with on_policy; None: no bound, as in TRL.

    Raises:
      ValueError: a loss is unknown, or does not take an argument that is given.
    """
    reward = reference_log_ratio(per_token, divergence, divergence_alpha, length_alpha=length_alpha)
    weight = on_policy_weight(weight_bound) if on_policy else None
    asked = {k: v for k, v in {"smoothing": smoothing, "margin": margin}.items() if v is not None}
    parts = loss_factors(loss)
    for name, value in asked.items():
        if not any(name in inspect.signature(LOSSES[part]).parameters for part in parts):
            raise ValueError(f"dpo({name}={value}): loss {loss!r} does not take it")
    plain = (per_token, divergence, length_alpha, on_policy) == (False, "reverse_kl", 1.0, False)
    if (ordered := [part for part in parts if part in AOT]) and not plain:
        raise ValueError(
            f"dpo({ordered[0]!r}) compares sums of log-ratios: it does not take per_token, divergence, length_alpha "
            "or on_policy"
        )
    terms: list[Term] = []
    for part, factor in parts.items():
        own: dict[str, Any] = {k: v for k, v in asked.items() if k in inspect.signature(LOSSES[part]).parameters}
        if part in AOT:
            term = aot(beta, **own, paired=AOT[part])
        else:
            term = preference(PAIRS[part](beta, **own), reward, weight)
        terms.append(scale(factor, term))
    contrast = reduce(add(*terms), sequence_mean())
    whole = sum_losses(contrast, chosen_likelihood(likelihood_coef)) if likelihood_coef else contrast
    return Algorithm(None, {"policy": whole}, example="pair")


def loss_factors(loss: str) -> dict[str, float]:
    """Parse "name" or "factor*name+factor*name" into {name: factor}.

    Raises:
      ValueError: a name is unknown or given twice.
    """
    parts = [re.fullmatch(r"(?:([\d.]+)\*)?(\w+)", part.strip()) for part in loss.split("+")]
    names = [part[2] for part in parts if part and part[2] in LOSSES]
    if len(names) < len(parts) or len(set(names)) < len(names):
        raise ValueError(f"loss={loss}: it must be one of {', '.join(LOSSES)}, or a sum such as 0.8*sigmoid+0.2*bco")
    return {part[2]: float(part[1] or 1) for part in parts if part}
