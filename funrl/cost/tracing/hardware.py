"""A small table of hardware, and the seconds of counted work."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Hardware(NamedTuple):
    """One device: numbers of its data sheet, and the share that a program reaches.

    Attributes:
      memory: size of memory in bytes.
      half, single, double: dense matrix FLOPs per second in 16, 32 (TF32 if available) and 64 bits.
      bandwidth: memory bandwidth in bytes per second.
      link: bytes per second and direction between devices of a node.
      network: bytes per second and direction from a device to other nodes.
      launch: seconds of the smallest kernel.
      latency: seconds of the smallest collective.
      efficiency: assumed share of the peak FLOPs, and of every bandwidth.
      accelerator: whether it multiplies 16-bit matrices into 32 bits without copying them.
      tpu: whether it is a TPU, for which another program is compiled.
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
    efficiency: tuple[float, float] = (0.5, 0.7)
    accelerator: bool = True
    tpu: bool = False


# Dense numbers without sparsity, SXM or OAM forms; 400 Gbit/s of network for each device (A100: 200). `cpu` is one core
# of a server with its share of the memory.
HARDWARE = {
    "a100": Hardware(
        memory=80e9, half=312e12, single=156e12, double=19.5e12, bandwidth=2.04e12, link=300e9, network=25e9
    ),
    "h100": Hardware(
        memory=80e9, half=989e12, single=495e12, double=67e12, bandwidth=3.35e12, link=450e9, network=50e9
    ),
    "h200": Hardware(
        memory=141e9, half=989e12, single=495e12, double=67e12, bandwidth=4.8e12, link=450e9, network=50e9
    ),
    "gb200": Hardware(  # one of the two GPUs of a superchip
        memory=186e9, half=2500e12, single=1250e12, double=45e12, bandwidth=8e12, link=900e9, network=50e9
    ),
    "mi300x": Hardware(
        memory=192e9, half=1307e12, single=654e12, double=163e12, bandwidth=5.3e12, link=448e9, network=50e9
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
    """Seconds of a kernel: the longest of its arithmetic, its reads and writes, and its launch."""
    rate = {2: hardware.half, 4: hardware.single, 8: hardware.double}.get(dtype.itemsize, hardware.single)
    of_peak, of_bandwidth = hardware.efficiency
    return max(flops / (rate * of_peak), nbytes / (hardware.bandwidth * of_bandwidth), hardware.launch)


def message_seconds(hardware: Hardware, count: float, nbytes: float, near: bool) -> float:
    """Seconds of messages from device to device, one after the other.

    Args:
      nbytes: total bytes.
      near: whether all ranks are in one node.
    """
    speed = (hardware.link if near else hardware.network) * hardware.efficiency[1]
    return count * hardware.latency + nbytes / speed


def collective_seconds(hardware: Hardware, op: str, count: float, nbytes: float, ranks: int, near: bool) -> float:
    """Seconds of `count` ring collectives over `ranks` devices: an all-reduce sends everything twice, others once.

    Args:
      nbytes: total bytes of the larger side, input or result.
      near: whether all ranks are in one node.
    """
    passes = (2 if op.startswith("all_reduce") else 1) * (ranks - 1) / ranks
    speed = (hardware.link if near else hardware.network) * hardware.efficiency[1]
    return count * hardware.latency + passes * nbytes / speed
