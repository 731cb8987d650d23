"""DPO: the policy learns which of two completions is better, by how far it moves from where it began.

    python -m funrl.experiments.dpo --mesh=dp4,tp2
    python -m funrl.experiments.dpo --model=DIR --data=FILE.jsonl

A line of the file is {"prompt": ..., "chosen": ..., "rejected": ...}. The first command prefers sums to what comes out
where the carries are forgotten, and begins with a policy that often forgets them.

`--loss=ipo --per_token` is IPO, and `--noreference --per_token --beta=2 --likelihood_coef=0` SimPO without its margin;
`funrl/algos/pair_losses.py` has all of them.

Left out on purpose: sampling the pairs from the policy, which is `online_pairs` in `funrl/algos/preference.py`.
"""

import sys

from funrl.algos import pair_losses
from funrl.algos.core import Loss, reduce, together
from funrl.algos.preference import chosen_likelihood, log_likelihood, preference, reference_log_ratio
from funrl.algos.reductions import sequence_mean
from funrl.experiments.run import main
from funrl.experiments.supervised import PREFERENCES

LOSSES = {
    "sigmoid": pair_losses.sigmoid_pairs, "hinge": pair_losses.hinge_pairs, "ipo": pair_losses.ipo_pairs,
    "robust": pair_losses.robust_pairs, "exo": pair_losses.exo_pairs, "nca": pair_losses.nca_pairs,
    "bco": pair_losses.bco_pairs, "sppo": pair_losses.sppo_pairs, "apo_zero": pair_losses.apo_zero_pairs,
    "apo_down": pair_losses.apo_down_pairs, "discopop": pair_losses.discopop_pairs,
}  # fmt: skip


def algorithm(
    loss: str = "sigmoid",
    beta: float = 0.1,
    reference: bool = True,
    per_token: bool = False,
    likelihood_coef: float = 1.0,
) -> Loss:
    """Direct preference optimisation, Rafailov et al., 2023, https://arxiv.org/abs/2305.18290, and its family.

    Args:
      loss: sigmoid (DPO), hinge, ipo, robust, exo, nca, bco, sppo, apo_zero, apo_down or discopop
      beta: how much a nat of log-ratio counts
      reference: compare with the policy before the run; off, as in CPO and SimPO: with nothing
      per_token: take the mean over a completion's tokens and not the sum, as IPO and SimPO do
      likelihood_coef: loss per nat of the chosen completions' negative log-likelihood, as in RPO, Pang et al., 2024,
        https://arxiv.org/abs/2404.19733; 0 is DPO as published, which may make both completions improbable
    """
    if loss not in LOSSES:
        raise ValueError(f"--loss={loss}: it must be one of {', '.join(LOSSES)}")
    reward = reference_log_ratio(per_token) if reference else log_likelihood(per_token)
    contrast = reduce(preference(LOSSES[loss](beta), reward), sequence_mean())
    return together(contrast, chosen_likelihood(likelihood_coef)) if likelihood_coef else contrast


if __name__ == "__main__":
    sys.exit(main("funrl.experiments.dpo", kind=PREFERENCES))
