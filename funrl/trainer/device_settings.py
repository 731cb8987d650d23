"""Flags of where a run computes: devices, how models are split over them, and what they may hold."""

from __future__ import annotations

from dataclasses import dataclass

from funrl.mesh.text import SHORT, TOKEN_AXES
from funrl.trainer.declaration import RL, above, at_least, at_most, flag, one_of, some_of

ROLES = ("policy", "critic", "reference", "implicit_reward", "reward_model", "process_reward_model", "teacher")


@dataclass(frozen=True)
class DeviceSettings:
    """The flags of the group "devices"."""

    mesh: str = flag(
        "dp1", "devices", "devices by axis, dp (data), ep (expert), sp (sequence) or tp (tensor), such as dp4,tp2; "
        "auto:8 chooses, and --fsdp too, by a dry run"
    )  # fmt: skip
    generate_mesh: str | None = flag(
        None, "devices", "the same devices while generating", chosen="all of them dp", kinds=RL
    )
    device: str | None = flag(
        None, "devices", "where tensors live", one_of("cpu", "cuda"), chosen="cuda where there is one"
    )
    dtype: str = flag(
        "float32",
        "devices",
        "what forward passes compute in (bfloat16 keeps float32 master weights)",
        one_of("float32", "float64", "bfloat16"),
    )
    fsdp: bool = flag(False, "devices", "shard weights, gradients and optimizer states over data and sp too")
    fsdp_axes: str | None = flag(
        None,
        "devices",
        "what --fsdp shards over; on dp2,ep4 ep makes shards of 4, twice",
        some_of(*(short for short, axis in SHORT.items() if axis in TOKEN_AXES)),
        chosen="all; over several nodes inside of each, if that fits",
        requires="fsdp",
    )
    fsdp_models: str | None = flag(
        None, "devices", "which models --fsdp shards", some_of(*ROLES), chosen="all", requires="fsdp"
    )
    sequence_parallel: str = flag(
        "auto", "devices", "attention where sp splits tokens of rows: ulysses exchanges heads for tokens, ring sends "
        "keys from rank to rank; auto: ulysses where the heads divide",
        one_of("auto", "ulysses", "ring"),
    )  # fmt: skip
    split_residual: str = flag(
        "auto", "devices", "split tokens between the halves of a layer over tp, whose norms and residuals then take "
        "1 / tp of the memory; auto: on GPUs",
        one_of("auto", "on", "off"),
    )  # fmt: skip
    remat: str = flag(
        "none",
        "devices",
        "what a backward pass computes again: full a whole layer, selective all of it but matmuls",
        one_of("none", "full", "selective"),
    )
    offload: str | None = flag(
        None,
        "devices",
        "what leaves a GPU while it is not needed",
        some_of("optimizer", "reference", "params"),
        kinds=RL,
    )
    hardware: str | None = flag(
        None,
        "devices",
        "whose memory and speed --dry_run takes",
        one_of("a100", "h100", "h200", "mi300x", "cpu"),
        chosen="h100",
        requires="dry_run",
    )
    timeout: int = flag(
        60, "devices", "minutes that a rank waits for another, such as for its reward", at_least(1), at_most(525600)
    )
    heartbeat: int = flag(
        60, "devices", "seconds without progress after which the run says for which rank, host and phase it waits",
        at_least(1), at_most(86400),
    )  # fmt: skip
    kv_cache_gb: float | None = flag(
        None, "devices", "keys and values that a rank may keep while it generates, in 1e9 bytes; what does not fit "
        "waits, or is computed again",
        above(0), kinds=RL, chosen="half of the memory that is free then",
    )  # fmt: skip
    decode_rows: int = flag(512, "devices", "completions that a rank decodes together at most", at_least(1), kinds=RL)
    speculate: int = flag(
        0, "devices", "tokens of a completion that are drafted by what followed before in its text, and drawn in one "
        "pass where few rows are decoded; 0: none. A draft changes no completion",
        at_least(0), kinds=RL,
    )  # fmt: skip
    queue: str = flag(
        "tickets", "devices", "how prompts come to ranks that generate: tickets, as a rank has room for them; fixed, "
        "by their numbers, which a run on GPUs needs to be repeated exactly",
        one_of("tickets", "fixed"), kinds=RL,
    )  # fmt: skip
    compile: str = flag(
        "auto", "devices", "compile one decoder layer; auto: where it pays, on CUDA", one_of("on", "off", "auto")
    )
