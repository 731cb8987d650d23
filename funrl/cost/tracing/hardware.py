"""A small table of hardware, and the seconds of counted work."""

from __future__ import annotations

from typing import NamedTuple

import torch

from funrl.compiled_kernels.gpu_kernels.trials import AssumedGPU
from funrl.mesh.plan import RANKS_PER_NODE


class Efficiency(NamedTuple):
    """Shares of a data sheet's numbers that kernels reach, by their kind.

    Attributes:
      product: share of the peak FLOPs of matrix products.
      attention, attention_backward: of attention over whole tiles.
      grouped, grouped_backward: of products of experts, and of those of their weights' gradients.
      engine: of products of an engine's iterations.
      memory: share of the bandwidth that other kernels reach.
      message: share of the bandwidths of link and network.
      fused: time of elementwise kernels of compiled layers, as a share of their time one by one.
      tiles: tiles of the longest row that attention takes longer, as its last processors wait for them.
    """

    product: float = 0.5
    attention: float = 0.5
    attention_backward: float = 0.5
    grouped: float = 0.5
    grouped_backward: float = 0.5
    engine: float = 0.5
    memory: float = 0.7
    message: float = 0.7
    fused: float = 1.0
    tiles: float = 0.0


class Hardware(NamedTuple):
    """One device: numbers of its data sheet, and the shares that kernels reach.

    Attributes:
      memory: size of memory in bytes.
      half, single, double: dense matrix FLOPs per second in 16, 32 (TF32 if available) and 64 bits.
      bandwidth: memory bandwidth in bytes per second.
      link: bytes per second and direction between devices of a node.
      network: bytes per second and direction from a device to other nodes.
      launch: seconds of the smallest kernel.
      latency: seconds of the smallest collective.
      processors: parts of the device that compute tiles of attention at the same time.
      efficiency: shares that kernels reach.
      accelerator: whether it multiplies 16-bit matrices into 32 bits without copying them.
      tpu: whether it is a TPU, for which another program is compiled.
      gpu: its L2 cache and processors, for kernels that work on blocks in the cache.
      node: devices of a node.
    """

    memory: float
    half: float
    single: float
    double: float
    bandwidth: float
    link: float
    network: float
    launch: float = 5e-6
    latency: float = 20e-6
    processors: int = 1
    efficiency: Efficiency = Efficiency()
    accelerator: bool = True
    tpu: bool = False
    gpu: AssumedGPU = AssumedGPU()
    node: int = RANKS_PER_NODE


# Shares that benchmarks/README.md measured on an H200. Attention by torch's FlashAttention-2 has the times of its rows
# of 4,096 and 32,768 tokens. Grouped products reach 30 and 17 %; the backward pass has one more of the first kind. A
# copy reaches 88 %, AdamW 56 % of the bandwidth. `fused` is of the table of a compiled layer. Products of large random
# matrices reach 79 to 82 %; 74 % in whole steps is fitted by benchmarks/published.py.
MEASURED_SHARES = Efficiency(
    product=0.74,
    attention=0.39,
    attention_backward=0.35,
    grouped=0.3,
    grouped_backward=0.12,
    fused=43 / 115,
    tiles=2.0,
)
# FlashAttention-2 on an A100: arXiv 2307.08691, up to 73 and 63 %.
AMPERE = MEASURED_SHARES._replace(attention=0.7, attention_backward=0.6)
# FlashAttention-3 on Hopper: pytorch/benchmark#2391 forward, 621 TFLOP/s at 16,384 tokens; arXiv 2407.08608 backward.
FLASH_ATTENTION_3 = {"attention": 0.62, "attention_backward": 0.5}


# Dense numbers without sparsity, SXM or OAM forms; 400 Gbit/s of network for each device (A100: 200). `cpu` is one core
# of a server with its share of the memory.
HARDWARE = {
    "a100": Hardware(
        memory=80e9,
        half=312e12,
        single=156e12,
        double=19.5e12,
        bandwidth=2.04e12,
        link=300e9,
        network=25e9,
        processors=108,
        efficiency=AMPERE,
    ),
    "h100": Hardware(
        memory=80e9,
        half=989e12,
        single=495e12,
        double=67e12,
        bandwidth=3.35e12,
        link=450e9,
        network=50e9,
        processors=132,
        efficiency=MEASURED_SHARES,
    ),
    "h200": Hardware(
        memory=141e9,
        half=989e12,
        single=495e12,
        double=67e12,
        bandwidth=4.8e12,
        link=450e9,
        network=50e9,
        processors=132,
        efficiency=MEASURED_SHARES,
    ),
    "gb200": Hardware(  # one of the two GPUs of a superchip
        memory=186e9,
        half=2500e12,
        single=1250e12,
        double=45e12,
        bandwidth=8e12,
        link=900e9,
        network=50e9,
        processors=148,
        efficiency=MEASURED_SHARES,
    ),
    "mi300x": Hardware(
        memory=192e9,
        half=1307e12,
        single=654e12,
        double=163e12,
        bandwidth=5.3e12,
        link=448e9,
        network=50e9,
        processors=304,
        efficiency=MEASURED_SHARES,
    ),
    # TPUs: docs.cloud.google.com/tpu/docs/v5e, v5p and v6e. They multiply 32 bits in six passes of 16; the link is one
    # direction of all ICI links of a chip, and the network a chip's share of the data center's (6.4 and 25.6 Tbit/s of
    # a pod of 256 chips of v5e and v6e, 50 Gbit/s of a chip of v5p).
    "v5e": Hardware(
        memory=16e9, half=197e12, single=33e12, double=1e12, bandwidth=819e9, link=200e9, network=3.1e9, tpu=True
    ),
    "v5p": Hardware(
        memory=95e9, half=459e12, single=76e12, double=2e12, bandwidth=2.77e12, link=600e9, network=6.2e9, tpu=True
    ),
    "v6e": Hardware(
        memory=32e9, half=918e12, single=153e12, double=4e12, bandwidth=1.64e12, link=400e9, network=12.5e9, tpu=True
    ),
    "cpu": Hardware(
        memory=16e9,
        half=5e10,
        single=1e11,
        double=5e10,
        bandwidth=1e10,
        link=1e9,
        network=1e9,
        launch=3e-6,
        latency=5e-3,
        accelerator=False,
    ),
}
_GPUS = {
    "a100": AssumedGPU(40 << 20, 108),
    "h100": AssumedGPU(50 << 20, 132),
    "h200": AssumedGPU(60 << 20, 132),
    "gb200": AssumedGPU(126 << 20, 148),
    "mi300x": AssumedGPU(4 << 20, 304),
}
HARDWARE |= {name: HARDWARE[name]._replace(gpu=gpu) for name, gpu in _GPUS.items()}
# Of a communicator of NCCL: 24 channels on a node of NVLink, each with a buffer of 10 MiB to receive (4 MiB of the
# simple protocol, 5 of LL128, 1 of LL; allocations of 10,485,760 bytes in github.com/NVIDIA/nccl/issues/1685). An
# all-to-all connects every pair of GPUs of a node, which is not counted: there one user saw 3.3 GB for 8 H100.
COMMUNICATOR_BYTES = 24 * 10 << 20
USABLE = 0.92  # of the memory: the rest goes to the driver, libraries and fragmentation


def hardware_of(device: str) -> Hardware:
    """The row of the table for this machine's devices; an unknown GPU has an H100's speed and its own memory.

    Args:
      device: "cpu", "cuda", or "xla", whose chips torch_xla does not describe: it has the host's row.
    """
    if device != "cuda":
        return HARDWARE["cpu"]
    properties = torch.cuda.get_device_properties(0)
    known = [name for name in HARDWARE if name in properties.name.lower().replace(" ", "")]
    return HARDWARE[known[0]] if known else HARDWARE["h100"]._replace(memory=properties.total_memory // 10**9 * 1e9)


def op_seconds(hardware: Hardware, flops: float, nbytes: float, dtype: torch.dtype) -> float:
    """Seconds of a product or of a kernel without one: the longest of arithmetic, reads and writes, and launch."""
    return kernel_seconds(hardware, KernelWork(flops, nbytes, dtype))[0]


class KernelWork(NamedTuple):
    """Work of one call of a kernel.

    Attributes:
      flops: of products and attention.
      nbytes: that it reads and writes.
      dtype: of its first result.
      kind: "elementwise", or the name of the share of the peak FLOPs that it reaches, as in `Efficiency`.
      tile: FLOPs of the longest row's tile of attention.
    """

    flops: float
    nbytes: float
    dtype: torch.dtype
    kind: str = "product"
    tile: float = 0.0


def kernel_seconds(hardware: Hardware, work: KernelWork) -> tuple[float, str]:
    """Seconds of a kernel, and what bounds it: its kind, "memory" or "launch"."""
    shares = hardware.efficiency
    rate = {2: hardware.half, 4: hardware.single, 8: hardware.double}.get(work.dtype.itemsize, hardware.single)
    elementwise = work.kind == "elementwise"
    factor = shares.fused if elementwise else 1.0
    moving = factor * work.nbytes / (hardware.bandwidth * shares.memory)
    computing = 0.0
    if work.flops:
        waiting = shares.tiles * hardware.processors * work.tile
        computing = (work.flops + waiting) / (rate * getattr(shares, work.kind))
    bounds = (
        (computing, work.kind),
        (moving, "elementwise" if elementwise else "memory"),
        (factor * hardware.launch, "launch"),
    )
    return max(bounds)


def message_seconds(hardware: Hardware, count: float, nbytes: float, near: bool) -> float:
    """Seconds of messages from device to device, one after the other.

    Args:
      nbytes: total bytes.
      near: whether all ranks are in one node.
    """
    speed = (hardware.link if near else hardware.network) * hardware.efficiency.message
    return count * hardware.latency + nbytes / speed


def collective_seconds(hardware: Hardware, op: str, count: float, nbytes: float, ranks: int, per_node: int) -> float:
    """Seconds of `count` collectives over `ranks` devices: an all-reduce sends everything twice, others once.

    Rings pass through every device of a node and leave it through a network card of each, so over nodes they have the
    cards of a node together; an all-to-all sends each device's share through its own card.

    Args:
      nbytes: total bytes of the larger side, input or result.
      per_node: ranks of the group on a node.
    """
    passes = (2 if op.startswith("all_reduce") else 1) * (ranks - 1) / ranks
    speed = hardware.link
    if ranks > per_node and op.startswith("all_to_all"):
        passes = (ranks - per_node) / ranks
        speed = hardware.network
    elif ranks > per_node:
        speed = min(hardware.link, hardware.network * per_node)
    return count * hardware.latency + passes * nbytes / (speed * hardware.efficiency.message)
