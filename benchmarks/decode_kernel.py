"""Tokens per CPU-second of the C++ decoding step alone, beside what the machine's memory and arithmetic allow.

    OMP_NUM_THREADS=1 python benchmarks/decode_kernel.py --repeats=5

Random Qwen3 models; prompts of 32 tokens, 128 new ones, sampled; prefill is included. The bound of a decoding step is
the longer of two times: of its arithmetic at the best rate that this machine's matrix products reached, and of reading
weights and cache at the rate of a sum over 512 MB. A model that fits the last cache may beat the second.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from absl import app, flags
from instruction_set import limit_instructions

from funrl import trees
from funrl.compiled_kernels.decode_step import PAGE, PackedDecoder, packed_decoder
from funrl.compiled_kernels.packed import pack_linear, packed_linear
from funrl.models import decoder_config, decoder_model
from funrl.models.decoder.compiled_step import step_sizes

SIZES = {  # layers, embed, heads, key-value heads, mlp, vocabulary
    "4x256": (4, 256, 4, 2, 1024, 2048),
    "4x256-32k": (4, 256, 4, 2, 1024, 32000),
    "12x768-32k": (12, 768, 12, 4, 2048, 32000),
}
MODELS = flags.DEFINE_list("models", list(SIZES), "layers x width, and the vocabulary")
DTYPES = flags.DEFINE_list("dtypes", ["float32", "bfloat16"], "of weights and cache")
BATCHES = flags.DEFINE_list("batches", ["1", "16", "64"], "sequences decoded together")
PROMPT = flags.DEFINE_integer("prompt_tokens", 32, "tokens of each prompt")
NEW = flags.DEFINE_integer("new_tokens", 128, "tokens of each completion")
REPEATS = flags.DEFINE_integer("repeats", 3, "timed turns")
THREADS = flags.DEFINE_integer("threads", 1, "CPU threads")


def main(argv: list[str]) -> None:
    del argv
    limit_instructions()
    torch.set_num_threads(THREADS.value)
    bandwidth, peaks = memory_rate(), {name: product_rate(getattr(torch, name)) for name in DTYPES.value}
    rates = ", ".join(f"{name} products {rate / 1e9:.0f} GF/s" for name, rate in peaks.items())
    print(f"{THREADS.value} threads; memory {bandwidth / 1e9:.0f} GB/s, {rates}")
    print(f"{'model':>11} {'dtype':>9} {'batch':>5} {'tok/CPU-s best':>15} {'median':>8} {'of the bound':>13}")
    for model in MODELS.value:
        layers, embed, heads, kv_heads, mlp, vocab = SIZES[model]
        sizes = {"vocab": vocab, "embed": embed, "layers": layers, "heads": heads, "kv_heads": kv_heads, "mlp": mlp}
        config = decoder_config(**sizes, head=64, qk_norm=True, tied=True, family="qwen3")
        params = decoder_model(config).init(torch.Generator().manual_seed(0))
        for name in DTYPES.value:
            decoder = packed_decoder(step_sizes(config), params, getattr(torch, name), THREADS.value)
            for batch in map(int, BATCHES.value):
                seconds = [cpu_seconds(lambda d=decoder, b=batch: generate(d, b)) for _ in range(REPEATS.value)]
                tokens = batch * NEW.value
                bound = NEW.value * step_bound(decoder, trees.count(params), batch, bandwidth, peaks[name])
                best, median = tokens / min(seconds), tokens / statistics.median(seconds)
                line = f"{model:>11} {name:>9} {batch:>5} {best:>15.0f} {median:>8.0f}"
                print(f"{line} {bound / min(seconds):>12.0%}", flush=True)


def generate(decoder: PackedDecoder, batch: int) -> torch.Tensor:
    """Complete random prompts; [B, new tokens]."""
    length, new = PROMPT.value, NEW.value
    generator = torch.Generator().manual_seed(1)
    prompts_BT = torch.randint(decoder.sizes.vocab, (batch, length), generator=generator)
    noise_SB = torch.rand(new, batch, dtype=torch.float64, generator=generator)
    pages = -(-(length + new) // PAGE)
    cache = decoder.init_cache(batch * pages)
    tables = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
    rows = torch.arange(batch)
    positions = torch.arange(length).repeat(batch)
    sequence = rows.repeat_interleave(length)
    logits = decoder.forward(cache, prompts_BT.flatten(), positions, sequence, tables, rows * length + length - 1)
    tokens = []
    for step in range(new):
        token, _, _ = decoder.sample(logits, rows, noise_SB[step], 1.0)
        tokens.append(token)
        logits = decoder.forward(cache, token, torch.full((batch,), length + step), rows, tables, rows)
    return torch.stack(tokens, 1)


def step_bound(decoder: PackedDecoder, parameters: int, batch: int, bandwidth: float, peak: float) -> float:
    """Seconds of one decoding step in the middle of the completion, if memory or arithmetic alone counted."""
    sizes = decoder.sizes
    tokens = PROMPT.value + NEW.value / 2
    numbers = parameters + batch * tokens * 2 * sizes.layers * sizes.kv_heads * sizes.head
    flops = 2 * batch * (parameters + 2 * tokens * sizes.layers * sizes.heads * sizes.head)
    return max(numbers * decoder.dtype.itemsize / bandwidth, flops / peak)


def memory_rate() -> float:
    """Bytes per CPU-second that a sum over 512 MB reads."""
    x = torch.ones(1 << 27)
    return x.nbytes / min(cpu_seconds(x.sum) for _ in range(5))


def product_rate(dtype: torch.dtype) -> float:
    """FLOPs per CPU-second of the better of torch's and our matrix products, from the cache."""
    x, w = torch.randn(960, 512).to(dtype), torch.randn(512, 512).to(dtype)
    packed = pack_linear(w)
    products = (lambda: x @ w, lambda: packed_linear(x, packed, THREADS.value))
    best = min(cpu_seconds(product) for product in products for _ in range(60))
    return 2 * x.numel() * len(w) / best


def cpu_seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


if __name__ == "__main__":
    app.run(main)
