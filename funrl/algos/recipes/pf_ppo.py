"""PF-PPO: PPO on rows resampled by how far their reward can be trusted.

References: Zhang et al., 2024, https://arxiv.org/abs/2409.06957.
verl: use_pf_ppo samples with the global random state; its default trainer writes the advantages back to the rows in
  their original order. TRL has none.
"""

from dataclasses import replace

from funrl.algos.advantages.resampling import resample_rows
from funrl.algos.core import Algorithm, chain
from funrl.algos.recipes.ppo import ppo


def pf_ppo(kind: str = "pow", power: float = 2.0, seed: int = 0, base: Algorithm | None = None) -> Algorithm:
    """Policy filtration for PPO.

    Args:
      kind: how rows are weighed: pow, max_min or max_random, as in `resampling_weights`.
      power: exponent of the score, for pow.
      seed: of the resampling.
      base: algorithm that is trained on the resampled rows; None: `ppo()`.
    """
    base = ppo() if base is None else base
    rows = resample_rows(kind, power, seed)
    return replace(base, advantage=rows if base.advantage is None else chain(rows, base.advantage))
