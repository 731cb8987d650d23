"""Kernels by themselves, in bfloat16, at the sizes of a model of 1.7 billion parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpu_parts.rows import Bench, Row, Rows, Run, median_seconds, timed_row

from funrl import trees
from funrl.compiled_kernels.delta_rule.gated_delta import continue_delta_rule, gated_delta_rule
from funrl.compiled_kernels.grouped_linear import grouped_linear
from funrl.compiled_kernels.linear_logprob import linear_logprob
from funrl.compiled_kernels.paged_attention import decode_paging, paged_attention, paged_bytes
from funrl.compiled_kernels.varlen_attention import varlen_attention
from funrl.cost.tracing.tracer import Tracer
from funrl.optim.base import step_
from funrl.optim.fused import fused_adamw
from funrl.rollout.native.cache_sizes import page_tokens

DTYPE = torch.bfloat16
PROMPTS = 16


class Sizes(NamedTuple):
    """Sizes of the kernels' model, and of the work."""

    heads: int = 16
    kv_heads: int = 8
    head: int = 128
    embed: int = 2048
    vocab: int = 151936
    experts: int = 64
    expert_mlp: int = 768
    chosen: int = 8
    short: int = 4096
    long: int = 32768
    rows: tuple[int, ...] = (64, 512)
    cached: int = 2048
    trained: int = 400_000_000
    product: int = 8192


SMALL = Sizes(2, 1, 16, 32, 256, 4, 16, 2, 64, 128, (2,), 64, 10_000, 64)


class Case(NamedTuple):
    """A call to time.

    Attributes:
      run: the call.
      touched: tensors that it has to read.
      nbytes: bytes that it moves; None: those of `touched` and of its results, once.
      captured: time a CUDA graph of it.
    """

    run: Run
    touched: Any
    nbytes: float | None = None
    captured: bool = False


def kernel_rows(bench: Bench) -> Rows:
    """Forward and backward of each kernel."""
    sizes = SMALL if bench.small else Sizes()
    cases = {
        "matrix product": lambda on: product(on, sizes),
        "copy of memory": lambda on: copied(on, sizes),
    }
    for tokens in (sizes.short, sizes.long):
        cases |= both_ways(f"varlen attention, one row of {tokens:,}", lambda on, n=tokens: attention(on, sizes, n))
    for rows in sizes.rows:
        cases[f"paged attention, {rows} rows of {sizes.cached:,}"] = lambda on, n=rows: paged(on, sizes, n)
    cases |= both_ways(f"linear log-prob, {sizes.short:,} tokens", lambda on: logprob(on, sizes))
    cases |= both_ways(f"grouped products, {sizes.experts} experts", lambda on: grouped(on, sizes))
    cases[f"fused AdamW, {sizes.trained / 1e6:,.0f} M float32 weights"] = lambda on: optimizer(on, sizes)
    for tokens in (sizes.short, sizes.long):
        cases |= both_ways(f"gated delta rule, {tokens:,} tokens", lambda on, n=tokens: delta_rule(on, sizes, n))
    prompts = f"gated delta rule, {PROMPTS} prompts of {sizes.short // PROMPTS:,}"
    cases[prompts] = lambda on: delta_prompts(on, sizes)
    for name, make in cases.items():
        yield measured(bench, name, make)


def measured(bench: Bench, name: str, make: Callable[[torch.device], Case]) -> Row:
    """Time a case on the device; its work is that of a trace of the same call on tensors without memory."""
    try:
        case = make(bench.device)
        seconds = median_seconds(bench, case.run, case.captured)
        del case
    except Exception as error:  # the other kernels go on
        return Row(name, None, "ms", note=f"{type(error).__name__}: {error}".splitlines()[0], failed=True)
    tracer = Tracer(bench.hardware)
    with tracer:
        traced = make(torch.device("cpu"))
        with tracer.phase("case"):
            results = traced.run()
    nbytes = trees.nbytes((traced.touched, results)) if traced.nbytes is None else traced.nbytes
    return timed_row(bench, name, seconds, tracer.phases["case"].flops, nbytes)


def both_ways(name: str, make: Callable[[torch.device], tuple[Callable[[], torch.Tensor], Any]]) -> dict[str, Callable]:
    """Cases of the forward and the backward pass of a function that is made with its inputs."""

    def forward(on: torch.device) -> Case:
        compute, inputs = make(on)
        return Case(compute, inputs)

    def backward(on: torch.device) -> Case:
        compute, inputs = make(on)
        leaves = [x for x in inputs if x.requires_grad]
        out = compute()
        grad = torch.ones_like(out)
        return Case(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True), (inputs, out, grad))

    return {f"{name}, forward": forward, f"{name}, backward": backward}


def random(on: torch.device, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers that are differentiated."""
    return torch.randn(shape, device=on, dtype=DTYPE).mul_(scale).requires_grad_()


def product(on: torch.device, sizes: Sizes) -> Case:
    x = random(on, sizes.product, sizes.product).detach()
    return Case(lambda: x @ x, x)


def copied(on: torch.device, sizes: Sizes) -> Case:
    x = random(on, sizes.trained).detach()
    out = torch.empty_like(x)
    return Case(lambda: out.copy_(x), x)


def attention(on: torch.device, sizes: Sizes, tokens: int) -> tuple[Callable[[], torch.Tensor], Any]:
    q = random(on, 1, tokens, sizes.heads, sizes.head)
    k = random(on, 1, tokens, sizes.kv_heads, sizes.head)
    v = random(on, 1, tokens, sizes.kv_heads, sizes.head)
    offsets = torch.tensor([0, tokens], dtype=torch.int32, device=on)
    return lambda: varlen_attention(q, k, v, offsets, longest=tokens), (q, k, v, offsets)


def paged(on: torch.device, sizes: Sizes, rows: int) -> Case:
    page = page_tokens(on.type)
    each = -(-sizes.cached // page)
    shape = rows * each, page, sizes.kv_heads, sizes.head
    keys, values = (torch.randn(shape, device=on, dtype=DTYPE) for _ in range(2))
    q = torch.randn(rows, sizes.heads, sizes.head, device=on, dtype=DTYPE)
    new = torch.randn(rows, sizes.kv_heads, sizes.head, device=on, dtype=DTYPE)
    table = torch.arange(rows * each, dtype=torch.int32, device=on).view(rows, each)
    positions = torch.full((rows,), sizes.cached - 1, device=on)
    places = table[:, -1].long() * page + positions % page
    paging = decode_paging(positions, table, places, running_B=positions > 0)
    nbytes = float(paged_bytes(q, keys, paging.groups_G5))
    return Case(lambda: paged_attention(q, new, new, (keys, values), paging), (), nbytes, captured=True)


def logprob(on: torch.device, sizes: Sizes) -> tuple[Callable[[], torch.Tensor], Any]:
    hidden = random(on, sizes.short, sizes.embed)
    unembed = random(on, sizes.vocab, sizes.embed, scale=sizes.embed**-0.5)
    ids = torch.arange(sizes.short, device=on) % sizes.vocab

    def compute() -> torch.Tensor:
        logp = linear_logprob(hidden, unembed, ids).logp
        assert logp is not None
        return logp

    return compute, (hidden, unembed, ids)


def grouped(on: torch.device, sizes: Sizes) -> tuple[Callable[[], torch.Tensor], Any]:
    rows = sizes.short * sizes.chosen
    x = random(on, rows, sizes.embed)
    weight = random(on, sizes.experts, sizes.expert_mlp, sizes.embed, scale=sizes.embed**-0.5)
    ends = torch.arange(1, sizes.experts + 1, dtype=torch.int32, device=on) * (rows // sizes.experts)
    return lambda: grouped_linear(x, weight, ends), (x, weight, ends)


def delta_heads(on: torch.device, sizes: Sizes, rows: int, tokens: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values, decays and betas of rows."""
    heads = 2 * sizes.heads
    q, k = (F.normalize(random(on, rows, tokens, sizes.heads, sizes.head), dim=-1) for _ in range(2))
    v = random(on, rows, tokens, heads, sizes.head)
    log_decay = -F.softplus(random(on, rows, tokens, heads).float())
    beta = random(on, rows, tokens, heads).sigmoid()
    return tuple(x.detach().requires_grad_() for x in (q, k, v, log_decay, beta))


def delta_rule(on: torch.device, sizes: Sizes, tokens: int) -> tuple[Callable[[], torch.Tensor], Any]:
    inputs = delta_heads(on, sizes, 1, tokens)
    return lambda: gated_delta_rule(*inputs), inputs


def delta_prompts(on: torch.device, sizes: Sizes) -> Case:
    q, k, v, log_decay, beta = (x.detach() for x in delta_heads(on, sizes, PROMPTS, sizes.short // PROMPTS))
    state = torch.zeros(PROMPTS, 2 * sizes.heads, sizes.head, sizes.head, device=on)
    return Case(lambda: continue_delta_rule(q, k, v, log_decay, beta, state), (q, k, v, state))


def optimizer(on: torch.device, sizes: Sizes) -> Case:
    leaf = max(1, sizes.trained // 40)
    params, grads = ([torch.ones(leaf, device=on) for _ in range(40)] for _ in range(2))
    adamw = fused_adamw(1e-6, weight_decay=0.1)
    state = adamw.init(params)

    def run() -> None:
        step_(adamw, grads, state, params)

    moments = [x for x in trees.leaves(state) if x.dim()]
    return Case(run, (), float(trees.nbytes(grads) + 2 * trees.nbytes((params, moments))))
