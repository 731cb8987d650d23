"""FlowRL: completions become as probable as their rewards say, instead of the best ones alone.

References: Zhu et al., 2025, https://arxiv.org/abs/2509.15207. Read: the paper's abstract, and the authors'
  loss and head in verl's recipe. With r the group's standardised reward, the loss is
  w (log Z(x) + mean_t log(pi / pi_ref) - beta r)^2.
verl: in a recipe, with log Z as a head on the policy that learns with it. The head is a perceptron of three layers on
  the mean hidden state of the prompt; w is the product of the ratios, at most 10, or in a variant their geometric mean,
  clipped, which is taken here. In the authors' repository it is the product without a bound: their clip has no effect.
  At the first update on a batch w is 1, and all agree.
TRL: none.

Here log Z is the critic, a model of its own: its value before the first sampled token. Each of the two learns with the
other's numbers before the step, which is exactly the joint loss where a step has one update (--minibatches=1).
--critic_lr, --critic_updates and --freeze=critic:PART say how log Z learns.
"""

from funrl.algos.advantages.baselines import group_center, group_scale
from funrl.algos.advantages.flow import flow_targets
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce, scale, weighted
from funrl.algos.losses.likelihood import opening_tokens, restrict
from funrl.algos.losses.reductions import sequence_mean, token_mean
from funrl.algos.losses.sequence_terms import flow_balance
from funrl.algos.losses.value_loss import clipped_value_loss


def flowrl(
    flow_beta: float = 15.0, clip_low: float = 0.2, clip_high: float = 0.28, entropy_coef: float = 0.0
) -> Algorithm:
    """Flow-balanced matching of reward distributions.

    Args:
      flow_beta: nats per token that one deviation of the reward in its group is worth.
      clip_low, clip_high: how far the weight of a completion may fall below and rise above 1.
      entropy_coef: factor of the entropy bonus, in squared nats per nat.
    """
    partition = reduce(weighted(scale(2.0, clipped_value_loss(None))), token_mean())
    balance = with_regularizers(flow_balance(clip_low, clip_high), 0.0, entropy_coef)
    return Algorithm(
        advantage=chain(group_center(), group_scale(), flow_targets(flow_beta)),
        losses={"critic": restrict(partition, opening_tokens), "policy": reduce(balance, sequence_mean())},
    )
