"""DPO: the policy learns which of two completions is better, by how far it moves from where it began.

    python -m funrl.experiments.dpo --mesh=dp4,tp2
    python -m funrl.experiments.dpo --model=DIR --data=FILE.jsonl

A line of the file is {"prompt": ..., "chosen": ..., "rejected": ...}. The first command prefers sums to what comes out
where the carries are forgotten, and begins with a policy that often forgets them. Its family, as flags:

    IPO    --loss=ipo --per_token
    SimPO  --noreference --per_token --beta=2 --margin=1 --likelihood_coef=0
    CPO    --noreference
    ORPO   --loss=odds_ratio --noreference --per_token
    MPO    --loss=0.8*sigmoid+0.2*bco

Left out on purpose: sampling the pairs from the policy, which is `online_pairs` in `funrl/algos/preference.py`.
"""

import inspect
import re
import sys

from funrl.algos import pair_losses, preference
from funrl.algos.core import Loss, add, reduce, scale, together
from funrl.algos.preference import chosen_likelihood, log_likelihood, reference_log_ratio
from funrl.algos.reductions import sequence_mean
from funrl.experiments.run import main

PAIRS = {
    "sigmoid": pair_losses.sigmoid_pairs, "hinge": pair_losses.hinge_pairs, "ipo": pair_losses.ipo_pairs,
    "robust": pair_losses.robust_pairs, "exo": pair_losses.exo_pairs, "nca": pair_losses.nca_pairs,
    "bco": pair_losses.bco_pairs, "sppo": pair_losses.sppo_pairs, "apo_zero": pair_losses.apo_zero_pairs,
    "apo_down": pair_losses.apo_down_pairs, "discopop": pair_losses.discopop_pairs,
}  # fmt: skip
WHOLE = {"aot": preference.aot, "odds_ratio": preference.odds_ratio}
FIXED = {"aot": "--reference --noper_token", "odds_ratio": "--noreference --per_token"}  # the rewards they take
LOSSES = PAIRS | WHOLE


def algorithm(
    loss: str = "sigmoid",
    beta: float = 0.1,
    smoothing: float | None = None,
    margin: float | None = None,
    reference: bool = True,
    per_token: bool = False,
    likelihood_coef: float = 1.0,
) -> Loss:
    """Direct preference optimisation, Rafailov et al., 2023, https://arxiv.org/abs/2305.18290, and its family.

    Args:
      loss: sigmoid (DPO), hinge, ipo, robust, exo, nca, bco, sppo, apo_zero, apo_down, discopop, aot or odds_ratio
        (ORPO); or a sum of some, each with a factor, such as 0.8*sigmoid+0.2*bco. aot orders the pairs of a
        micro-batch
      beta: how much a nat of log-ratio counts
      smoothing: probability that a label is wrong, for sigmoid, robust, exo and aot; default: the loss's own
      margin: by how much the chosen completion should win, for sigmoid; default: 0
      reference: compare with the policy before the run; off, as in CPO and SimPO: with nothing
      per_token: take the mean over a completion's tokens and not the sum, as IPO and SimPO do
      likelihood_coef: loss per nat of the chosen completions' negative log-likelihood, as in RPO, Pang et al., 2024,
        https://arxiv.org/abs/2404.19733; 0 is DPO as published, which may make both completions improbable
    """
    reward = reference_log_ratio(per_token) if reference else log_likelihood(per_token)
    asked = {k: v for k, v in {"smoothing": smoothing, "margin": margin}.items() if v is not None}
    parts, terms = factors(loss), []
    for name, value in asked.items():
        if not any(name in inspect.signature(LOSSES[part]).parameters for part in parts):
            raise ValueError(f"--{name}={value}: --loss={loss} has none")
    for part, factor in parts.items():
        own = {k: v for k, v in asked.items() if k in inspect.signature(LOSSES[part]).parameters}
        rewards = f"--{'' if reference else 'no'}reference --{'' if per_token else 'no'}per_token"
        if FIXED.get(part, rewards) != rewards:
            raise ValueError(f"--loss={loss}: the reward of {part} is always that of {FIXED[part]}; give these")
        made = LOSSES[part](beta, **own)
        terms.append(scale(factor, made if part in WHOLE else preference.preference(made, reward)))
    contrast = reduce(add(*terms), sequence_mean())
    return together(contrast, chosen_likelihood(likelihood_coef)) if likelihood_coef else contrast


def factors(loss: str) -> dict[str, float]:
    """{name: factor} of "name" or "factor*name+factor*name"."""
    parts = [re.fullmatch(r"(?:([\d.]+)\*)?(\w+)", part.strip()) for part in loss.split("+")]
    names = [part[2] for part in parts if part and part[2] in LOSSES]
    if len(names) < len(parts) or len(set(names)) < len(names):
        raise ValueError(f"--loss={loss}: it must be one of {', '.join(LOSSES)}, or a sum such as 0.8*sigmoid+0.2*bco")
    return {part[2]: float(part[1] or 1) for part in parts if part}


if __name__ == "__main__":
    sys.exit(main("dpo", algorithm="funrl.experiments.dpo:algorithm"))
