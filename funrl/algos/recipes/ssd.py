"""SSD: likelihood of the policy's own completions, sampled at another temperature and truncated, whatever their score.

References: Zhang et al., 2026, https://arxiv.org/abs/2604.01193. Its abstract, the cards of its models and the page of
  TRL's trainer were read.
verl: none found in 0.9. TRL: an experimental trainer by its documentation, which leaves out empty completions and those
  of a single line; 1.16.0 has none.

Run it with --temperature, --top_k, --top_p and --raw_logp. Each step samples from the policy of now; --steps=1 with
--minibatches samples from the first alone, as published.
"""

from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.core import Algorithm, reduce
from funrl.algos.losses.likelihood import negative_log_likelihood
from funrl.algos.losses.reductions import token_mean


def ssd() -> Algorithm:
    """Simple self-distillation: no rewards, no teacher.

    Warning: without --raw_logp and with another temperature the likelihood is of the tempered distribution that was
      sampled from, of which the gradient has a mean of 0.
    """
    return Algorithm(advantage=to_tokens(), losses={"policy": reduce(negative_log_likelihood(), token_mean())})
