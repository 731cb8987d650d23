"""The engine whose passes run in JAX."""

import functools

import pytest

pytest.importorskip("jax")
import torch

from funrl import trees
from funrl.mesh.mesh import SINGLE
from funrl.models import decoder_config, decoder_model
from funrl.models.decoder.gated_delta_net import GatedDeltaNet
from funrl.models.decoder.latent_attention import LatentSizes
from funrl.models.model import Lora
from funrl.rollout.engine import complete
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.requests import Request
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.lowered.decoding import XlaBackend

pytestmark = pytest.mark.xla

SIZES = {"vocab": 40, "embed": 16, "layers": 2, "heads": 4, "kv_heads": 2, "head": 4, "mlp": 32, "qk_norm": "head"}
WAYS = ({"greedy": True}, {"temperature": 0.8, "top_p": 0.9}, {"repetition_penalty": 1.3})


def jiggled(x):
    return x + 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(x.numel()), dtype=x.dtype)


def weights(model, dtype):
    return trees.cast(trees.map(jiggled, model.init(torch.Generator().manual_seed(0))), dtype)


def engines(model, dtype, **options):
    """An engine in torch, and one in JAX."""
    options = {"max_rows": 4, "cache_bytes": 1 << 20} | options
    torch_engine = native_engine(model, SINGLE, dtype, NativeOptions(**options, packed=False))
    make_backend = functools.partial(XlaBackend, SINGLE.sizes)
    jax_engine = native_engine(model, SINGLE, dtype, NativeOptions(**options, static=True, make_backend=make_backend))
    for engine in (torch_engine, jax_engine):
        engine.load(trees.named(weights(model, dtype)))
    return torch_engine, jax_engine


def prompts_of(lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 40, (n,), generator=generator).tolist() for n in lengths]


def request(number, prompt, count, adapter=None, **sampling):
    """A request for this many tokens."""
    return Request(number, prompt, Sampling(max_new_tokens=count, stop=(3,), **sampling), number, adapter=adapter)


def requests(adapters=(None,), **sampling):
    """More than the engine has rows; two pairs begin with equal tokens and share pages.

    Three take the places of others while one still runs, and end together: passes have few sizes, each a program.
    """
    prompts = prompts_of((3, 39, 17, 8, 20))
    prompts += [[*prompts[1], 5], prompts[2]]
    counts = (8, *[6] * 6)
    return [
        request(i, prompt, count, adapters[i % len(adapters)], **sampling)
        for i, (prompt, count) in enumerate(zip(prompts, counts, strict=True))
    ]


def assert_same(wanted, result, gap):
    by_number = {x.number: x for x in result}
    for want in wanted:
        x = by_number[want.number]
        assert x.tokens.tolist() == want.tokens.tolist() and x.finish == want.finish
        assert (x.raw_logp - want.raw_logp).abs().max() < gap
        assert (x.sampling_logp - want.sampling_logp).abs().max() < gap


@pytest.mark.slow
def test_windows_adapters_and_ways_to_sample_are_those_of_torch():
    """Beside requests without an adapter, and loaded again with another scale, which a program has as a constant."""
    model = decoder_model(decoder_config(**SIZES, windows=(6, None)))
    results = []
    for engine in engines(model, torch.float64):
        done = []
        for alpha, count in ((4.0, None), (40.0, 1)):
            lora = Lora(rank=2, alpha=alpha, targets=("q", "down"))
            layouts = trees.named(engine.adapter_weights(lora).layouts)
            factors = {name: jiggled(torch.zeros(layout.shape, dtype=torch.float64)) for name, layout in layouts}
            engine.load_adapter("own", lora, factors.items())
            cases = zip(prompts_of((3, 17, 8)), (8, 8, 4), ("own", None, "own"), WAYS, strict=True)
            mixed = [request(i, *case, **way) for i, (*case, way) in enumerate(cases)]
            done.append(complete(engine, mixed[:count]))
        results.append(done)
    for wanted, item in zip(*results, strict=True):
        assert_same(wanted, item, 1e-12)


@pytest.mark.slow
def test_latent_attention_decodes_as_in_torch():
    latent = LatentSizes(kv_rank=8, q_rank=None, nope=4, rope=4, value=4)
    sizes = SIZES | {"qk_norm": None, "head": 8, "kv_heads": 4, "layers": 1}
    model = decoder_model(decoder_config(**sizes, latent=latent))
    wanted, result = (complete(engine, requests(greedy=True)[1:3]) for engine in engines(model, torch.float64))
    assert_same(wanted, result, 1e-12)


@pytest.mark.slow
def test_states_of_linear_attention_are_those_of_torch():
    """Prompts of several pages, prompts that go on from snapshots, and copies of a begun sequence's state."""
    mixer = GatedDeltaNet(2, 4, 8, 6)
    sizes = SIZES | {"mixers": (mixer, None)}
    results = []
    for engine in engines(decoder_model(decoder_config(**sizes)), torch.float32, snapshot_tokens=16):
        first = complete(engine, requests(greedy=True))
        more = [
            Request(9 + i, [*x.prompt, *y.tokens.tolist(), 7], x.sampling, 9 + i)
            for i, (x, y) in enumerate(
                zip(requests(greedy=True)[1:3], sorted(first, key=lambda y: y.number)[1:3], strict=True)
            )
        ]
        group = [request(20 + i, list(range(21)), 6, greedy=True) for i in range(2)]
        results.append([*first, *complete(engine, [*more, *group])])
    assert_same(*results, 1e-5)
