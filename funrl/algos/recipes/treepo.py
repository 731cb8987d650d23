"""TreePO: paths of a tree, each compared with the paths that share its beginning, at every branch.

References: Li et al., 2025, https://arxiv.org/abs/2508.17445. Read: the paper's abstract, and the authors'
advantage and training script, https://github.com/multimodal-art-projection/TreePO.
verl: its authors' fork multiplies a shared token's gradient by the number of its paths; here it counts once, in the
whitening too. There the advantage is tree_reinforce_plus_plus_baseline, weighted by size or, in their script, not; the
numbers of leaves agree before the whitening.
TRL: none. ms-swift samples trees in a plug-in and leaves advantages to GRPO.

Trees are episodes whose trajectories share nodes; each leaf is an agent with a reward of its own. Their sampler, which
branches segments of a completion, is not here.
"""

from funrl.algos.advantages.returns import whiten
from funrl.algos.advantages.subtrees import subtree_baselines
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.reductions import token_mean


def treepo(
    subtree_sizes: bool = False,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 10.0,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """Tree-based policy optimisation.

    Args:
      subtree_sizes: weigh each subtree by its number of paths.
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1.
      dual_clip: the largest ratio that counts where the advantage is negative; None: no bound.
      kl_coef: factor of the KL in the loss, in units of advantage per nat; 0: none, and no reference.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
    """
    surrogate = clipped_surrogate(clip_low, clip_high, dual_clip)
    return Algorithm(
        advantage=chain(subtree_baselines(subtree_sizes), whiten()),
        losses={"policy": reduce(with_regularizers(surrogate, kl_coef, entropy_coef), token_mean())},
    )
