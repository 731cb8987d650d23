"""Completions of engines on meshes of JAX's CPU devices against those of torch on one."""

from functools import partial

import torch
from test_lowered_decoding import SIZES, jiggled, requests, weights

from funrl import trees
from funrl.mesh.mesh import SINGLE
from funrl.mesh.text import parse
from funrl.models import decoder_config, decoder_model
from funrl.models.decoder.gated_delta_net import GatedDeltaNet
from funrl.models.decoder.routing import Experts
from funrl.models.model import Lora
from funrl.rollout.engine import complete
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.trainer.lowered.decoding import XlaBackend

LORA = Lora(rank=2, alpha=4.0, targets=("q", "down"))


def completions(model, dtype, make_backend, adapters, second=None):
    """Completions of an engine, and the largest number of pages that each lane had.

    Args:
      second: how every other one is sampled; the rest is greedy, and all are without it.
    """
    snapshots = 16 * (model.cell_bytes(SINGLE, dtype) > 0)
    options = NativeOptions(4, 1 << 20, packed=False, snapshot_tokens=snapshots, make_backend=make_backend)
    engine = native_engine(model, SINGLE, dtype, options._replace(static=make_backend is not None))
    engine.load(trees.named(weights(model, dtype)))
    if adapters[0]:
        layouts = trees.named(engine.adapter_weights(LORA).layouts)
        factors = [(name, jiggled(torch.zeros(layout.shape, dtype=dtype))) for name, layout in layouts]
        engine.load_adapter("own", LORA, factors)
    greedy, sampled = (requests(adapters, **way) for way in ({"greedy": True}, second or {"greedy": True}))
    done = complete(engine, [pair[i % 2] for i, pair in enumerate(zip(greedy, sampled, strict=True))])
    return done, [pool.peak for pool in engine._scheduler.pool.lanes]


def gap_of(result, wanted):
    """The largest difference of a log-probability, up to the first other token, and whether all tokens are equal."""
    gaps = []
    for x, y in zip(result, wanted, strict=True):
        count = min(len(x.tokens), len(y.tokens))
        same = (x.tokens[:count] == y.tokens[:count]).long().cumprod(0).sum()
        gaps.append((x.raw_logp[: same + 1] - y.raw_logp[: same + 1]).abs().max().item())
    return max(gaps), all(x.tokens.tolist() == y.tokens.tolist() for x, y in zip(result, wanted, strict=True))


def differences(dtype, text):
    """Completions in JAX against torch.

    Returns: the largest difference of a log-probability, the rounding of torch, the most pages of each lane, and
      whether the tokens are equal.

    Args:
      dtype: of weights and cache; tokens of bfloat16 are greedy. The rounding of other dtypes is left out, as 0.
      text: a mesh as --generate_mesh has it, with "+lora" where requests name adapters, and "+states" where a layer
        keeps states, and the engine takes snapshots of them.
    """
    mesh, *kinds = text.split("+")
    sizes = parse(mesh)
    adapters = ("own", None) if "lora" in kinds else (None,)
    more = {"experts": Experts(4, 2, 8)} if sizes["expert"] > 1 else {}
    more |= {"mixers": (GatedDeltaNet(2, 4, 8, 6), None)} if "states" in kinds else {}
    model = decoder_model(decoder_config(**SIZES | more))
    second = None if dtype == torch.bfloat16 else {"temperature": 0.8, "top_p": 0.9}
    wanted, _ = completions(model, dtype, None, adapters, second)
    result, peaks = completions(model, dtype, partial(XlaBackend, sizes), adapters, second)
    gap, same = gap_of(result, wanted)
    rounding = 0.0
    if dtype == torch.bfloat16:
        rounding, _ = gap_of(wanted, completions(model, torch.float64, None, adapters)[0])
    return gap, rounding, peaks, same
