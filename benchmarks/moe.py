"""Time of a mixture of experts, forward and backward: grouped products, a loop over experts, and transformers' block.

    python benchmarks/moe.py
    python benchmarks/moe.py --experts=128 --embed=2048 --mlp=768 --tokens=4096 --device=cuda --dtype=bfloat16

Each gets the same weights, tokens and gradient, and their results are compared first. Printed are the medians of
several rounds, taken in turn, and the ratios to the grouped one. Transformers' block is as it comes: its loop over the
experts that were chosen.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl.mesh.mesh import single
from funrl.models.decoder.experts import mixture
from funrl.models.decoder.routing import Experts


def looped(experts: Experts, params: dict[str, Tensor], x_TD: Tensor) -> Tensor:
    """The same by one product an expert, each on the rows that its tokens are picked out into."""
    probs_TE = F.linear(x_TD, params["router"]).softmax(-1, torch.float32)
    top_TK, ids_TK = probs_TE.topk(experts.per_token, -1)
    top_TK = (top_TK / top_TK.sum(-1, keepdim=True)).to(x_TD.dtype)
    out_TD = torch.zeros_like(x_TD)
    for e in range(experts.count):
        token, slot = (ids_TK == e).nonzero(as_tuple=True)
        gate, up, down = (params[f"expert_{name}"][e] for name in ("gate", "up", "down"))
        h = F.silu(F.linear(x_TD[token], gate)) * F.linear(x_TD[token], up)
        out_TD = out_TD.index_add(0, token, F.linear(h, down) * top_TK[token, slot, None])
    return out_TD


def peer_block(experts: Experts, params: dict[str, Tensor]) -> tuple[torch.nn.Module, list[Tensor]]:
    """Transformers' Qwen3-MoE block with these weights, and its own copies of them."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=params["router"].shape[1],
        moe_intermediate_size=experts.mlp,
        num_experts=experts.count,
        num_experts_per_tok=experts.per_token,
        norm_topk_prob=True,
    )
    block = Qwen3MoeSparseMoeBlock(config).to(params["router"])
    with torch.no_grad():
        block.gate.weight.copy_(params["router"])
        block.experts.gate_up_proj.copy_(torch.cat([params["expert_gate"], params["expert_up"]], 1))
        block.experts.down_proj.copy_(params["expert_down"])
    return block, list(block.parameters())


def timed(run: Callable[[], Tensor], leaves: list[Tensor], grad: Tensor) -> tuple[float, float]:
    """Seconds of a forward pass and of a backward pass."""
    wait = torch.cuda.synchronize if grad.is_cuda else lambda: None
    wait()
    begin = time.perf_counter()
    out = run()
    wait()
    middle = time.perf_counter()
    torch.autograd.grad(out, leaves, grad.view(out.shape))
    wait()
    return middle - begin, time.perf_counter() - middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("experts", 64), ("per_token", 8), ("embed", 512), ("mlp", 384), ("tokens", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    got = parser.parse_args()
    experts, dtype = Experts(got.experts, got.per_token, got.mlp), getattr(torch, got.dtype)
    E, D, M = got.experts, got.embed, got.mlp
    torch.manual_seed(0)
    shapes = {"router": (E, D), "expert_gate": (E, M, D), "expert_up": (E, M, D), "expert_down": (E, D, M)}
    made = {name: torch.randn(shape) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    params = {name: x.to(got.device, dtype).requires_grad_() for name, x in made.items()}
    x_TD, grad_TD = (torch.randn(got.tokens, D).to(got.device, dtype) for _ in range(2))
    block, own = peer_block(experts, params)
    leaves, mesh = list(params.values()), single(got.device)
    ways: dict[str, tuple[Callable[[], Tensor], list[Tensor]]] = {
        "grouped": (lambda: mixture(experts, mesh, params, x_TD[None])[0][0], leaves),
        "looped": (lambda: looped(experts, params, x_TD), leaves),
        "transformers": (lambda: block(x_TD[None])[0], own),
    }
    first = ways["grouped"][0]()
    for name, (run, _) in ways.items():
        gap = (run() - first).abs().max().item() / first.abs().max().item()
        assert gap < (1e-4 if dtype == torch.float32 else 0.1), f"{name} gives other numbers: {gap}"
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(got.rounds):
        for name, (run, weights) in ways.items():
            seconds[name].append(timed(run, weights, grad_TD))
    print(f"{E} experts of {M}, {got.per_token} a token, {got.tokens} tokens of {D}, {got.dtype} on {got.device}")
    print(f"{'':14}{'forward':>12}{'backward':>12}{'both':>12}{'ratio':>8}")
    medians = {
        name: [statistics.median(x) for x in (*zip(*runs, strict=True), [sum(run) for run in runs])]
        for name, runs in seconds.items()
    }
    for name, times in medians.items():
        cells = "".join(f"{1000 * x:10.1f}ms" for x in times)
        print(f"{name:14}{cells}{times[2] / medians['grouped'][2]:8.2f}")


if __name__ == "__main__":
    main()
