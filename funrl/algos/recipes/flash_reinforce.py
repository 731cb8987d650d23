"""FlashREINFORCE: one completion a prompt, compared with the batch; sequences far from the policy that sampled them go.

References: Hu et al., 2026, https://github.com/yifanzhang-pro/FlashREINFORCE. Its README, its notes and its reference
  loss were read; tests/algos/test_flash_reinforce.py has numbers of that loss.
verl: its rollout correction rejects sequences by k1, k2 and k3 instead. TRL: none found in 1.16.
OpenRLHF: the same by options (pull request 1339). Molt: the same, with log-ratios bounded at 30, here at 20.

Run it with --samples_per_prompt=1, --minibatches=1 and --staleness: the divergence is that before the update.
"""

from funrl.algos.advantages.baselines import batch_center
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.corrections.rejection import reject_divergence
from funrl.algos.losses.ratios import token_ratio
from funrl.algos.losses.reductions import sequence_mean
from funrl.algos.losses.token_terms import surrogate


def flash_reinforce(max_divergence: float = 0.003, kl_coef: float = 0.0, entropy_coef: float = 0.0) -> Algorithm:
    """REINFORCE with a batch baseline, importance weights of tokens and a trust region of sequences.

    Args:
      max_divergence: the largest mean divergence of a sequence from the engine, in nats per token; sequences beyond
        have no gradient, and still count in the baseline and in the mean.
      kl_coef: factor of the KL in the loss, in units of advantage per nat; 0: none, and no reference.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.

    Warning: the ratio to the engine already includes its gap to the trainer: do not add `importance_weights`.
    """
    near = reject_divergence("binary", "mean", max_divergence, in_denominator=True)
    term = surrogate(token_ratio("rollout_logp"))
    return Algorithm(
        advantage=chain(batch_center(), to_tokens(), near),
        losses={"policy": reduce(with_regularizers(term, kl_coef, entropy_coef), sequence_mean())},
    )
