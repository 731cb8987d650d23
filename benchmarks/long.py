"""Peak memory and time of training on long packed rows: one rank, and ranks that share the tokens of a row.

    python benchmarks/long.py [--tokens=4096,16384,65536] [--ranks=1,2,4] [--rows=4] [--nopeer] [--limit=600]
    python benchmarks/long.py --tokens=262144 --window=4096 --nopeer

A decoder of two layers with one head of 64 (so that keys go round a ring between ranks) learns by cross-entropy from
rows whose lengths are 1/2, 1/4, ... of the tokens, the last two equal: packed end to end here, and padded to the
longest one in transformers' own model of the same sizes, in one batch, as its trainers do. Every measurement is a
forward and backward pass in processes of their own; memory is the growth of a rank's resident bytes to the highest
point (Linux). On one machine ranks share its cores, so time is given as CPU-seconds of all ranks for 1000 tokens.
"""

from __future__ import annotations

import functools
import gc
import time

import numpy as np
import torch
from absl import app, flags
from random_trainer import alone, clear_peak, resident

from funrl import trees
from funrl.batch import Batch
from funrl.mesh.collectives import gather_objects
from funrl.mesh.launch import launch
from funrl.mesh.mesh import Mesh, parse
from funrl.models import decoder_config, decoder_model, place
from funrl.trainer.steps.micro import micro_batch

SIZES = {"vocab": 512, "embed": 64, "layers": 2, "heads": 1, "kv_heads": 1, "head": 64, "mlp": 192}
TOKENS = flags.DEFINE_list("tokens", ["4096", "16384", "65536"], "tokens of all rows together")
RANKS = flags.DEFINE_list("ranks", ["1", "2", "4"], "ranks that share them")
ROWS = flags.DEFINE_integer("rows", 4, "rows", lower_bound=2)
PEER = flags.DEFINE_bool("peer", True, "measure transformers too")
WINDOW = flags.DEFINE_integer("window", 0, "tokens that a token sees at most; 0: all before it", lower_bound=0)
LIMIT = flags.DEFINE_float("limit", 600, "seconds that one measurement may take; it is left out if it takes longer")


def lengths_of(tokens: int, rows: int) -> np.ndarray:
    """Halves, quarters and so on of the tokens; the last two equal."""
    halves = [tokens >> min(i + 1, rows - 1) for i in range(rows)]
    return np.array(halves)


def rows_of(tokens: int, rows: int) -> tuple[torch.Tensor, np.ndarray]:
    """Token ids [rows, longest], and the lengths."""
    lengths = lengths_of(tokens, rows)
    ids = torch.randint(0, SIZES["vocab"], (rows, int(lengths.max())), generator=torch.Generator().manual_seed(0))
    return ids, lengths


def packed_pass(mesh: Mesh, tokens: int, rows: int) -> tuple[float, float]:
    """Bytes at the highest point of this rank, and its CPU-seconds, of a forward and backward pass."""
    ids, lengths = rows_of(tokens, rows)
    mask = torch.arange(ids.shape[1]) < torch.from_numpy(lengths)[:, None]
    windows = (WINDOW.value,) * SIZES["layers"] if WINDOW.value else None
    model = decoder_model(decoder_config(family="mistral" if windows else "llama", windows=windows, **SIZES))
    placed, params = place(model, mesh), model.init(torch.Generator().manual_seed(0))
    batch = Batch(tokens=ids.int(), mask=mask)

    def loss(weights: trees.Tree, size: int, which: np.ndarray) -> tuple[torch.Tensor, tuple]:
        piece = micro_batch(batch, lengths, which, size, 2 * rows, mesh).batch
        return -placed.token_scores(weights, piece).logp.sum() / size, ()

    small = lengths.copy()
    trees.value_and_grad(loss)(params, int(small[-1]), np.array([rows - 1]))  # what libraries take comes first
    return measured(lambda: trees.value_and_grad(loss)(params, tokens, np.arange(rows)))


def padded_pass(tokens: int, rows: int) -> tuple[float, float]:
    """The same of transformers' own model, on padded rows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ids, lengths = rows_of(tokens, rows)
    config = LlamaConfig(
        vocab_size=SIZES["vocab"],
        hidden_size=SIZES["embed"],
        num_hidden_layers=SIZES["layers"],
        num_attention_heads=SIZES["heads"],
        num_key_value_heads=SIZES["kv_heads"],
        head_dim=SIZES["head"],
        intermediate_size=SIZES["mlp"],
        max_position_embeddings=tokens,
        attn_implementation="sdpa",
    )
    model, mask = LlamaForCausalLM(config), torch.arange(ids.shape[1]) < torch.from_numpy(lengths)[:, None]
    labels = ids.masked_fill(~mask, -100)

    def step(some: slice) -> None:
        model(input_ids=ids[:, some], attention_mask=mask[:, some].long(), labels=labels[:, some]).loss.backward()

    step(slice(0, int(lengths[-1])))
    return measured(lambda: step(slice(None)))


def measured(run) -> tuple[float, float]:
    """Growth of resident bytes to the highest point of a call, and its CPU-seconds."""
    gc.collect()
    before = resident("VmRSS")
    clear_peak()
    began = time.process_time()
    run()
    return resident("VmHWM") - before, time.process_time() - began


def measure(what: str, tokens: int, rows: int) -> dict[str, float]:
    """One measurement: the peer's, or that of as many ranks."""
    if what == "peer":
        each = [padded_pass(tokens, rows)]
    else:
        each = launch(lambda mesh: gather_objects(packed_pass(mesh, tokens, rows), mesh), parse(f"sp{what}"), "cpu")
    return {"bytes": max(peak for peak, _ in each), "seconds": sum(spent for _, spent in each)}


def main(_: list[str]) -> None:
    named = {f"{n} rank{'s' * (n != '1')}": n for n in RANKS.value} | ({"transformers": "peer"} if PEER.value else {})
    print("tokens    who             MB a rank, peak   CPU-seconds for 1000 tokens, all ranks")
    for text in TOKENS.value:
        for name, what in named.items():
            found = alone(functools.partial(measure, what, int(text), ROWS.value), LIMIT.value)
            if found is None:
                print(f"{int(text):6,d}    {name:14s}  over {LIMIT.value:.0f} s", flush=True)
                continue
            per_token = 1e3 * found["seconds"] / int(text)
            print(f"{int(text):6,d}    {name:14s}  {found['bytes'] / 1e6:15.1f}   {per_token:27.3f}", flush=True)


if __name__ == "__main__":
    app.run(main)
