"""Tokens per second of the native engine and of transformers' generate on the same random model, in turns.

    python benchmarks/decode.py --batches=1,16,64 --repeats=5

Both complete the same prompts with the same weights, without stop tokens, so every row has `--new_tokens` tokens. The
two take turns, so that what else the machine does falls on both; medians of the seconds, and the ratio of each turn's
seconds, are printed. transformers runs as a user would run it (sampling, no scores kept).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from absl import app, flags

from funrl import trees
from funrl.mesh.mesh import single
from funrl.models import Config, decoder_model
from funrl.rollout.completions import Sampling
from funrl.rollout.hf_engine import hf_engine
from funrl.rollout.native import native_engine

BATCHES = flags.DEFINE_list("batches", ["1", "16", "64"], "prompts completed together")
LAYERS = flags.DEFINE_integer("layers", 4, "layers")
EMBED = flags.DEFINE_integer("embed", 256, "model width; heads have 64")
VOCAB = flags.DEFINE_integer("vocab", 1024, "vocabulary")
PROMPT = flags.DEFINE_integer("prompt_tokens", 32, "tokens of each prompt")
NEW = flags.DEFINE_integer("new_tokens", 64, "tokens of each completion")
REPEATS = flags.DEFINE_integer("repeats", 5, "timed turns of each, after one that is not timed")
THREADS = flags.DEFINE_integer("threads", 1, "CPU threads")
CLOCK = flags.DEFINE_enum("clock", "wall", ["wall", "cpu"], "seconds to count: wall, or CPU's on a busy machine")
DEVICE = flags.DEFINE_string("device", "cpu", "cpu or cuda")


def main(argv: list[str]) -> None:
    del argv
    torch.set_num_threads(THREADS.value)
    heads = max(1, EMBED.value // 64)
    config = Config(
        vocab=VOCAB.value,
        embed=EMBED.value,
        layers=LAYERS.value,
        heads=heads,
        kv_heads=max(1, heads // 2),
        head=64,
        mlp=4 * EMBED.value,
    )
    mesh = single(DEVICE.value)
    model = decoder_model(config)
    params = model.init(torch.Generator().manual_seed(0))
    engine, peer = native_engine(model, mesh), hf_engine(model, mesh)
    engine.load(engine.weights.named(params))
    peer.load(peer.weights.named(params))

    def ours(tokens_BT: torch.Tensor, turn: int) -> torch.Tensor:
        return engine.generate(tokens_BT.tolist(), Sampling(max_new_tokens=NEW.value), seed=turn).tokens

    def theirs(tokens_BT: torch.Tensor, turn: int) -> torch.Tensor:
        torch.manual_seed(turn)
        how = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW.value, "pad_token_id": 0}
        both = {"inputs": tokens_BT, "attention_mask": torch.ones_like(tokens_BT)}
        return peer.model.generate(**both, **how)[:, PROMPT.value :]

    what = f"{PROMPT.value} + {NEW.value} tokens, {THREADS.value} threads, {CLOCK.value} seconds"
    print(f"{trees.count(params) / 1e6:.1f}M parameters, {what}")
    print(f"{'batch':>6} {'native tok/s':>13} {'transformers tok/s':>19} {'ratio (min .. max)':>22}")
    for batch in map(int, BATCHES.value):
        generator = torch.Generator().manual_seed(1)
        tokens_BT = torch.randint(config.vocab, (batch, PROMPT.value), generator=generator).to(mesh.device)
        turns = [[seconds(run, tokens_BT, turn) for run in (ours, theirs)] for turn in range(REPEATS.value + 1)][1:]
        ratios = [b / a for a, b in turns]
        speeds = [batch * NEW.value / statistics.median(column) for column in zip(*turns, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f})"
        print(f"{batch:>6} {speeds[0]:>13.0f} {speeds[1]:>19.0f} {spread:>22}", flush=True)


def seconds(run: Callable[[torch.Tensor, int], torch.Tensor], tokens_BT: torch.Tensor, turn: int) -> float:
    """Seconds of one turn, its result read back included."""
    clock = time.perf_counter if CLOCK.value == "wall" else time.process_time
    start = clock()
    done = run(tokens_BT, turn)
    assert len(done.tolist()) == len(tokens_BT) and done.shape[1] == NEW.value
    return clock() - start


if __name__ == "__main__":
    app.run(main)
