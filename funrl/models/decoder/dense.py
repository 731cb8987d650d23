"""A gated mlp that every token goes through."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.exact.gate import Activation, gated
from funrl.mesh.mesh import Mesh
from funrl.models.decoder.layers import Context, WeightAxes, WeightShapes
from funrl.models.decoder.row_parallel import multiply_and_sum
from funrl.models.low_rank import multiply
from funrl.models.split_residual import enter
from funrl.models.token_costs import LayerCost


@dataclass(frozen=True)
class Dense:
    """Mlp: down(activation(gate h) * up h); see `Mlp`.

    Attributes:
      inner: size F.
      activation: of the gate, as `gated` has them.
      bias: all three products have one.
    """

    inner: int
    activation: Activation = "silu"
    bias: bool = False

    @property
    def routed(self) -> bool:
        """All tokens go through the same weights."""
        return False

    def shapes(self, embed: int) -> WeightShapes:
        """Shapes of the whole weights."""
        shapes: dict[str, tuple[int, ...]] = {
            "gate": (self.inner, embed),
            "up": (self.inner, embed),
            "down": (embed, self.inner),
        }
        if self.bias:
            shapes |= {"gate_bias": (self.inner,), "up_bias": (self.inner,), "down_bias": (embed,)}
        return shapes

    def axes(self) -> WeightAxes:
        """Logical axes of the weights."""
        return {
            "gate": ("mlp", "embed"),
            "up": ("mlp", "embed"),
            "down": ("embed", "mlp"),
            "gate_bias": ("mlp",),
            "up_bias": ("mlp",),
            "down_bias": ("norm",),
        }

    def initial(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        """First values of a weight: as most begin."""
        return None

    def apply(self, params: trees.Tree, h_BTD: Tensor, mesh: Mesh, context: Context) -> tuple[Tensor, None]:
        """Compute each token, as `Mlp.apply`."""
        h_BTD = enter(h_BTD, mesh, context.split)
        gate_BTF = multiply(h_BTD, params["gate"], params.get("gate_bias"))
        up_BTF = multiply(h_BTD, params["up"], params.get("up_bias"))
        inner_BTF = gated(gate_BTF, up_BTF, self.activation)
        del gate_BTF, up_BTF
        out_BTD = multiply_and_sum(inner_BTF, params["down"], mesh, context.split)
        return (out_BTD + params["down_bias"] if self.bias else out_BTD), None

    def cost(self, cost: LayerCost) -> LayerCost:
        """Fill in the inner size."""
        return cost._replace(inner=self.inner)
