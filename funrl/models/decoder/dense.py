"""A gated mlp that every token goes through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.exact.gate import gated
from funrl.mesh.mesh import Mesh
from funrl.models.decoder.layers import Context, WeightAxes, WeightShapes
from funrl.models.decoder.row_parallel import multiply_and_sum
from funrl.models.decoder.watch import watched
from funrl.models.low_rank import multiply
from funrl.models.model import LayerCost
from funrl.models.split_residual import enter


@dataclass(frozen=True)
class Dense:
    """Mlp: down(activation(gate h) * up h); see `Mlp`.

    Attributes:
      inner: size F.
      activation: of the gate; "gelu" is the approximation by tanh.
    """

    inner: int
    activation: Literal["silu", "gelu"] = "silu"

    @property
    def routed(self) -> bool:
        """All tokens go through the same weights."""
        return False

    def shapes(self, embed: int) -> WeightShapes:
        """Shapes of the whole weights."""
        return {"gate": (self.inner, embed), "up": (self.inner, embed), "down": (embed, self.inner)}

    def axes(self) -> WeightAxes:
        """Logical axes of the weights."""
        return {"gate": ("mlp", "embed"), "up": ("mlp", "embed"), "down": ("embed", "mlp")}

    def initial(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        """First values of a weight: as most begin."""
        return None

    def apply(self, params: trees.Tree, h_BTD: Tensor, mesh: Mesh, context: Context) -> tuple[Tensor, None]:
        """Compute each token, as `Mlp.apply`."""
        h_BTD = enter(h_BTD, mesh, context.split)
        gate_BTF = watched("gate product", multiply(h_BTD, params["gate"]))
        up_BTF = watched("up product", multiply(h_BTD, params["up"]))
        inner_BTF = watched("gate", gated(gate_BTF, up_BTF, self.activation))
        del gate_BTF, up_BTF
        return watched("down product", multiply_and_sum(inner_BTF, params["down"], mesh, context.split)), None

    def cost(self, cost: LayerCost) -> LayerCost:
        """Fill in the inner size."""
        return cost._replace(inner=self.inner)
