"""SPPO: the log-ratio of a completion is regressed on its win rate against the others of its prompt.

References: Wu et al., 2024, https://arxiv.org/abs/2405.00675.
verl: in a recipe, regresses on the raw reward. TRL: sppo_hard, a DPO loss on pairs, where one of two always wins.
"""

from funrl.algos.advantages.baselines import win_rate
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.reductions import sequence_mean
from funrl.algos.losses.sequence_terms import self_play_regression


def sppo(eta: float = 1.0, entropy_coef: float = 0.0) -> Algorithm:
    """Self-play preference optimisation.

    Args:
      eta: nats of log-ratio per unit of win rate. The paper's 1e3 suits summed log-probabilities of long completions.
      entropy_coef: factor of the entropy bonus, in squared nats per nat.
    """
    return Algorithm(
        advantage=chain(win_rate(), to_tokens()),
        losses={"policy": reduce(with_regularizers(self_play_regression(eta), 0.0, entropy_coef), sequence_mean())},
    )
