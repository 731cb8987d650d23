"""Gated delta rule of one layer beside transformers' own code on a CPU, forward and with the backward pass.

    python benchmarks/delta_net.py --key_heads=4 --value_heads=8 --key=128 --value=128 --tokens=1024

transformers' function is the one that its models call where flash-linear-attention is not installed. Both take the same
random inputs in float32; the fastest of `--rounds` turns counts, the two in turn. Times are of all cores together, so
that other programs of the machine count little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from funrl.compiled_kernels.delta_rule.gated_delta import gated_delta_rule


def own(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """This package's function."""
    return gated_delta_rule(q, k, v, log_decay, beta)


def theirs(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """transformers' function, which scales queries itself."""
    return torch_chunk_gated_delta_rule(q * q.shape[-1] ** 0.5, k, v, log_decay, beta)[0]


def measured(compute: Callable[..., Tensor], inputs: Sequence[Tensor], backward: bool) -> float:
    """Milliseconds of one call, of all cores together."""
    begin = time.process_time()
    with torch.set_grad_enabled(backward):
        out = compute(*inputs)
        if backward:
            torch.autograd.grad(out, inputs, torch.ones_like(out))
    return 1e3 * (time.process_time() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"key_heads": 4, "value_heads": 8, "key": 128, "value": 128, "tokens": 1024}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(1, options.tokens, *shape, generator=generator)

    inputs = [
        F.normalize(draw(options.key_heads, options.key), dim=-1) * options.key**-0.5,
        F.normalize(draw(options.key_heads, options.key), dim=-1),
        draw(options.value_heads, options.value),
        -F.softplus(draw(options.value_heads)),
        draw(options.value_heads).sigmoid(),
    ]
    difference = (own(*inputs) - theirs(*inputs)).abs().max()
    inputs = [x.requires_grad_() for x in inputs]
    print(f"{torch.get_num_threads()} threads, largest difference {difference:.1e}")
    print(f"{'':<10}{'forward':>10}{'both':>10}")
    times = {"funrl": (own, []), "transformers": (theirs, [])}
    for _ in range(options.rounds):
        for compute, taken in times.values():
            taken.append([measured(compute, inputs, backward) for backward in (False, True)])
    fastest = {name: [min(x) for x in zip(*taken, strict=True)] for name, (_, taken) in times.items()}
    for name, (forward, both) in fastest.items():
        print(f"{name:<12}{forward:>8.2f}{both:>10.2f}")
    ratios = [b / a for a, b in zip(*fastest.values(), strict=True)]
    print(f"{'ratio':<12}{ratios[0]:>8.2f}{ratios[1]:>10.2f}")


if __name__ == "__main__":
    main()
