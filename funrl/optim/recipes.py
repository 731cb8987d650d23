"""Optimizers: chains of transformations, from gradients to what is added to the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from funrl import trees
from funrl.mesh.mesh import Mesh
from funrl.optim.adam import scale_by_adam
from funrl.optim.base import Transformation, chain
from funrl.optim.masking import partition
from funrl.optim.orthogonal import EMBED, JORDAN, Coefficients, MatrixView, axes_by_name, matrix_view, orthogonalize
from funrl.optim.scaling import Mask, add_decayed_weights, matrices, scale_by_learning_rate, trace
from funrl.optim.schedules import Schedule


def sgd(learning_rate: float | Schedule, momentum: float | None = None, nesterov: bool = False) -> Transformation:
    """Stochastic gradient descent.

    Args:
      learning_rate: a number or a schedule.
      momentum: decay of the sum of gradients; None: no momentum.
      nesterov: look one step ahead.
    """
    steps = [] if momentum is None else [trace(momentum, nesterov)]
    return chain(*steps, scale_by_learning_rate(learning_rate), name="sgd")


def adamw(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Mask = None,
    mu_dtype: torch.dtype | None = None,
) -> Transformation:
    """Adam with decoupled weight decay: p <- p - lr (adam(g) + weight_decay p).

    Args:
      learning_rate: a number or a schedule.
      b1, b2, eps, mu_dtype: see `scale_by_adam`.
      weight_decay: per update, in units of the learning rate; 0 is Adam.
      mask: which leaves decay (`matrices` for the usual choice); None: all.

    References: Loshchilov and Hutter, 2019, https://arxiv.org/abs/1711.05101
    Warning: the default decay is 0; optax has 1e-4 and torch.optim.AdamW 1e-2.
    """
    return chain(
        scale_by_adam(b1, b2, eps, mu_dtype=mu_dtype),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
        name="adamw",
    )


def muon(
    learning_rate: float | Schedule,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.0,
    scaling: str = "match_rms_adamw",
    coefficients: Coefficients = JORDAN,
    ns_dtype: torch.dtype | None = None,
    adamw_learning_rate: float | Schedule | None = None,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    axes: trees.Tree = None,
    layouts: trees.Tree = None,
    mesh: Mesh | None = None,
    view: Callable[[str, Sequence[str]], MatrixView] = matrix_view,
    mask: Mask = matrices,
) -> Transformation:
    """Muon for matrices inside the model; AdamW for embeddings, unembedding, norms, biases and heads of values.

        m <- g + momentum m,   u = g + momentum m  (nesterov),   p <- p - lr (s orthogonalize(u) + weight_decay p)

    Args:
      learning_rate: a number or a schedule.
      momentum, nesterov: see `trace`.
      weight_decay: per update, in units of the learning rate; of what Muon takes, and of the rest what `mask` selects.
      scaling: s, see `orthogonalize`. With "match_rms_adamw" updates are as large as AdamW's, so that a learning rate
        and a decay that suit AdamW suit both; "original" wants one of about 0.02, and AdamW one of its own.
      coefficients, ns_dtype, axes, layouts, mesh, view: see `orthogonalize`.
      adamw_learning_rate: None: the same.
      b1, b2, eps: of AdamW.
      mask: which of AdamW's weights decay; None: all.
      axes: the weights' logical axes; those with `embed` and without `vocab` are matrices inside the model. None: what
        `matrices` selects.

    References: Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/; Liu et al., 2025,
      https://arxiv.org/abs/2502.16982
    Warning: torch.optim.Muon defaults to "original" and a decay of 0.1; optax.contrib.muon corrects the bias of both
      terms of Nesterov's sum, which changes its direction in the first updates.
    """
    inside = chain(
        trace(momentum, nesterov),
        orthogonalize(scaling, coefficients, ns_dtype, axes=axes, layouts=layouts, mesh=mesh, view=view),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(learning_rate),
    )
    rate = learning_rate if adamw_learning_rate is None else adamw_learning_rate
    rest = adamw(rate, b1, b2, eps=eps, weight_decay=weight_decay, mask=mask)
    known = axes_by_name(axes)

    def label(name: str, is_matrix: bool) -> str:
        own = known.get(name, ())
        inside_model = len(own) > 1 and "vocab" not in own and any(axis in EMBED for axis in own)
        return "muon" if (is_matrix if axes is None else inside_model) else "adamw"

    def labels(params: trees.Tree) -> trees.Tree:
        return trees.map_named(label, matrices(params))

    return partition({"muon": inside, "adamw": rest}, labels, name="muon")
