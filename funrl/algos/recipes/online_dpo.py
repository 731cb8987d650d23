"""Online DPO: DPO on pairs of the best and the worst of the policy's own samples.

References: Guo et al., 2024, https://arxiv.org/abs/2402.04792.
verl: in a recipe. TRL: OnlineDPOTrainer, two samples a prompt, between which a judge or a reward model chooses; its ipo
  takes the mean over tokens, which is `loss="ipo", per_token=True` here.
"""

from funrl.algos.core import Algorithm
from funrl.algos.filters.by_group import unequal_scores
from funrl.algos.recipes.dpo import dpo


def online_dpo(loss: str = "sigmoid", beta: float = 0.1, per_token: bool = False) -> Algorithm:
    """Direct preference optimisation on pairs that the policy samples and a reward ranks.

    Args:
      loss: as in dpo: sigmoid, hinge, ipo and others, or a weighted sum.
      beta: scale of the log-ratio, per nat.
      per_token: take the mean over a completion's tokens instead of the sum, as IPO does.
    """
    pairs = dpo(loss, beta, per_token=per_token)
    return Algorithm(None, pairs.losses, filter=unequal_scores(), example="pair")
