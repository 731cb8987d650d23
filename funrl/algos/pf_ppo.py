"""PF-PPO: PPO on rows that are drawn again by how far their reward can be trusted.

References: Zhang et al., 2024, https://arxiv.org/abs/2409.06957.
verl: use_pf_ppo draws by the global random state; its default trainer writes the advantages back to the rows as they
  stood before. TRL has none.
"""

from __future__ import annotations

from dataclasses import replace

from funrl.algos.core import Algorithm, chain
from funrl.algos.ppo import ppo
from funrl.algos.resampling import resample_rows


def pf_ppo(kind: str = "pow", power: float = 2.0, seed: int = 0, base: Algorithm | None = None) -> Algorithm:
    """Policy filtration for PPO.

    Args:
      kind, power, seed: of `resample_rows`.
      base: what is trained on the rows that are drawn; None: `ppo()`.
    Needs: what the base needs, and score.
    """
    base = ppo() if base is None else base
    return replace(base, advantage=chain(resample_rows(kind, power, seed), base.advantage))
