"""The optimizer that the flags describe."""

from __future__ import annotations

from funrl import trees
from funrl.mesh.mesh import Mesh
from funrl.optim import Transformation, adamw, chain, clip_by_global_norm, global_norm
from funrl.optim import constant, warmup_cosine
