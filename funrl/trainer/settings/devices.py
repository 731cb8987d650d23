"""Flags of devices: how models are split over them, and how long ranks wait."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

from funrl.mesh.pools.joining import generators_join, training_sizes
from funrl.mesh.pools.placement import Placement, read_placement
from funrl.mesh.text import SHORT, TOKEN_AXES, MeshFlag, parse, read_mesh, wanted_devices
from funrl.role_kinds import ROLES
from funrl.trainer.settings.declaration import RL, FlagOptions, at_least, at_most, flag, names_like, one_of, some_of


@dataclass(frozen=True)
class DeviceSettings:
    """Devices, and how models are split over them."""

    mesh: str = flag(
        "dp1",
        "devices per axis, dp (data), ep (expert), sp (sequence) or tp (tensor), such as dp4,tp2; auto:8 chooses "
        "these and --fsdp by a dry run",
        effect="ranks",
    )
    generate_mesh: str | None = flag(
        None, "mesh of the same devices for generation", chosen="all of them dp", kinds=RL, effect="ranks"
    )
    place: str | None = flag(
        None,
        "ranks that train, generate, or score for a role, such as 'train:dp4@0-3 generate:dp2@4-5 reference:1@6'; "
        "generate:2 adds two; generate:join: other jobs; auto:8 chooses by a dry run",
        example="generate:1",
        chosen="all do both",
        kinds=RL,
        effect="ranks",
    )
    device: str | None = flag(
        None,
        "where tensors live; xla: training on torch_xla",
        one_of("cpu", "cuda", "xla"),
        chosen="cuda where there is one",
        effect="ranks",
    )
    sequence_parallel: str = flag(
        "auto",
        "attention if sp splits the tokens of rows: ulysses exchanges heads for tokens, ring sends keys from rank to "
        "rank; auto: ulysses if sp divides the heads",
        one_of("auto", "ulysses", "ring"),
        effect="ranks",
    )
    split_residual: str = flag(
        "auto",
        "split the residual stream's tokens over tp, so that norms and residuals take 1 / tp of the memory; auto: on "
        "GPUs",
        one_of("auto", "on", "off"),
        effect="ranks",
    )
    remat: str = flag(
        "none",
        "what a backward pass recomputes: full, whole layers; selective, everything but matmuls",
        one_of("none", "full", "selective"),
        effect="work",
    )
    offload: str | None = flag(
        None,
        "what is offloaded from a GPU while it is not needed",
        some_of("optimizer", "reference", "params"),
        kinds=RL,
        effect="work",
    )

    @functools.cached_property
    def placement(self) -> Placement | None:
        """The pools of ranks, parsed once; None: every rank trains, auto:N, or no pools. Raises: MeshError."""
        if self.place is None or self.joined or self._wanted is not None:
            return None
        return read_placement(self.place, read_mesh(self.mesh).chosen)

    @property
    def joined(self) -> bool:
        """True if generators of other jobs generate, and every rank of the run trains."""
        return generators_join(self.place)

    @property
    def _wanted(self) -> int | None:
        """N of --place=auto:N. Raises: MeshError."""
        return None if self.place is None else wanted_devices(self.place, "place")

    @property
    def written(self) -> str:
        """The mesh to train on, or the pools, for people."""
        if self.joined:
            return f"place {self.place}"
        return f"mesh {self.mesh}" if self.place is None else f"place {self.placement or self.place}"

    @functools.cached_property
    def train(self) -> MeshFlag:
        """The mesh to train on, parsed once. Raises: MeshError."""
        placement = self.placement
        if placement is not None:
            return MeshFlag("place", str(placement), placement.train.sizes)
        if self.place is not None and self._wanted is not None:
            return MeshFlag("place", self.place, parse(f"dp{self._wanted}"), wanted=self._wanted)
        if self.place is not None and self.joined:
            return MeshFlag("place", self.place, training_sizes(self.place, read_mesh(self.mesh).chosen))
        return read_mesh(self.mesh)

    @functools.cached_property
    def generate(self) -> MeshFlag | None:
        """The mesh to generate on, parsed once; None: the flag is not given. Raises: MeshError."""
        placement = self.placement
        if placement is not None:
            return MeshFlag("place", str(placement), placement.generate.sizes)
        text = self.generate_mesh
        return None if text is None else read_mesh(text, "generate_mesh", automatic=False)


@dataclass(frozen=True)
class ShardSettings:
    """Shards of weights, gradients and optimizer states."""

    fsdp: bool = flag(False, "shard weights, gradients and optimizer states over data and sp too", effect="ranks")
    fsdp_axes: str | None = flag(
        None,
        "axes that --fsdp shards over; on dp2,ep4, ep makes 2 replicas of 4 shards",
        some_of(*(short for short, axis in SHORT.items() if axis in TOKEN_AXES)),
        chosen="all; on several nodes within each, if that fits",
        requires="fsdp",
        effect="ranks",
    )
    fsdp_models: str | None = flag(
        None,
        "which models --fsdp shards",
        names_like(*ROLES),
        example="policy",
        chosen="all",
        requires="fsdp",
        effect="ranks",
    )
    grad_reduce_dtype: str = flag(
        "auto",
        "dtype in which --fsdp sends gradients and sums them over ranks; bfloat16 sends half the bytes and rounds each "
        "partial sum to 8 bits; auto: that of the weights, which is float32, or float64 with --dtype=float64",
        one_of("auto", "float32", "bfloat16"),
        requires="fsdp",
    )


@dataclass(frozen=True)
class WaitSettings:
    """Waiting for other ranks."""

    SHARED: ClassVar[FlagOptions] = {"effect": "event"}

    timeout: int = flag(
        60, "minutes that a rank waits for another one, as for the rewards of that", at_least(1), at_most(525600)
    )
    heartbeat: int = flag(
        60,
        "seconds without progress after which the run reports the rank, host and phase that it waits for",
        at_least(1),
        at_most(86400),
    )
    stalled_after: int = flag(
        300,
        "seconds without a heartbeat from a rank's process, or with a stopped checkpoint writer, after which the run "
        "ends; a long computation does not stop the heartbeat",
        at_least(1),
        at_most(86400),
    )
