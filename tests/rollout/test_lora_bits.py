"""Adapters in the native engine: the trainer's bits, mixed per request, with versions and pages of their own.

A draw is a number; `python -m pytest tests/rollout/test_lora_bits.py -k "draw and 17"` runs one alone.
"""

import functools
import random

import pytest
import torch
from bit_texts import FAMILIES, Texts, model_of, unlike
from selection import quick

from funrl import trees
from funrl.compiled_kernels.exact import low_rank
from funrl.compiled_kernels.exact.operators import exact_linear
from funrl.compiled_kernels.kernel_library import library_problem
from funrl.mesh.launch import launch
from funrl.mesh.mesh import SINGLE, parse
from funrl.mesh.rules import GENERATE, layouts, shard
from funrl.models import decoder_config, decoder_model
from funrl.models.decoder.latent_attention import LatentSizes
from funrl.models.decoder.routing import Experts
from funrl.models.errors import ModelError
from funrl.models.lora import on_base, trained_part, with_lora
from funrl.models.model import Inputs, Lora
from funrl.rollout.engine import complete
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.requests import requests_of
from funrl.rollout.sampling_parameters import Sampling

pytestmark = pytest.mark.skipif(library_problem() is not None, reason=str(library_problem()))
DRAWS, QUICK = 10, 3
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
ALL = ("q", "k", "v", "o", "gate", "up", "down")
# Several ranks and targets; one draw has them all.
LORAS = {"all": Lora(4, 8.0, ALL), "some": Lora(1, 3.0, ("q", "down")), "wide": Lora(17, 9.0, ("k", "o", "up"))}


@functools.cache
def adapted(family, name):
    """A model with adapters, and what learns of its weights, in which B counts too."""
    plain, _ = model_of(family)
    model = with_lora(plain, LORAS[name])
    generator = torch.Generator().manual_seed(len(name))
    own = trained_part(model, model.init(generator, torch.float64))
    return model, trees.map(lambda x: x + 0.2 * torch.randn(x.shape, generator=generator, dtype=torch.float64), own)


def load_adapter(engine, family, name, version=1, factor=1.0):
    """Give an engine this rank's shards of an adapter."""
    model, own = adapted(family, name)
    mesh = engine.weights.mesh
    placed = trained_part(model, layouts(model.shapes, model.axes, GENERATE, sizes=mesh.sizes))
    named = engine.adapter_weights(LORAS[name]).named(shard(trees.map(lambda x: factor * x, own), placed, mesh))
    engine.load_adapter(name, LORAS[name], named, version)


def engine_with(family, names, dtype=torch.float32, mesh=SINGLE, **options):
    """An engine with a base of version 5 and adapters of versions 10, 11, ..."""
    model, params = model_of(family)
    engine = native_engine(model, mesh, dtype, NativeOptions(**options))
    placed = layouts(model.shapes, model.axes, GENERATE, sizes=mesh.sizes)
    engine.load(engine.weights.named(shard(params, placed, mesh)), 5)
    for version, name in enumerate(names, 10):
        load_adapter(engine, family, name, version)
    return engine


class AdaptedTexts(Texts):
    """Completions of an engine whose requests name adapters; the trainer scores each with its own."""

    def generate(self, family, mesh=SINGLE, names=(None, *LORAS), **options):
        pick, vocab = self.pick, self.model.config.vocab
        engine = engine_with(family, [name for name in names if name], self.dtype, mesh, **options)
        lengths = [pick.choice([1, 3, 17, 40]) for _ in range(pick.randint(1, 3))]
        prompts = [[pick.randrange(vocab) for _ in range(length)] for length in lengths]
        sampling = Sampling(
            max_new_tokens=pick.choice([1, 6, 12]), temperature=self.temperature, samples=pick.randint(1, 2)
        )
        requests = requests_of([pick.choice(prompts) for _ in range(4)], sampling, seed=pick.randrange(99))
        requests = [request._replace(adapter=pick.choice(names)) for request in requests]
        pick.shuffle(requests)
        self.family, self.requests = family, requests
        first = complete(engine, [request._replace(most=pick.choice([None, 3])) for request in requests])
        again = [i for i, done in enumerate(first) if done.finish == "paused"]
        rest = complete(engine, [requests[i]._replace(begun=first[i]) for i in again])
        for i, done in zip(again, rest, strict=True):
            first[i] = done
        self.all_done, self.engine = first, engine
        return self

    def differ(self, mesh=SINGLE, **options):
        total = 0
        for name in {request.adapter for request in self.requests}:
            own = [i for i, request in enumerate(self.requests) if request.adapter == name]
            self.prompts = [list(self.requests[i].prompt) for i in own]
            self.done = [self.all_done[i] for i in own]
            self.model, self.params = model_of(self.family)
            if name is not None:
                base = self.params
                self.model, factors = adapted(self.family, name)
                self.params = on_base(self.model, base, factors)
            total += super().differ(mesh, **options)
        return total


def draw(number):
    """Number of a draw -> texts of an engine that mixes adapters."""
    pick = random.Random(number)
    torch.set_num_threads(pick.choice([1, 2]))
    options = {"packed": pick.choice([True, True, False]), "speculate": pick.choice([0, 0, 3])}
    options["max_rows"] = pick.choice([1, 3, 512])
    if not options["packed"] and not options["speculate"]:
        options["static"] = pick.choice([True, False])
    family, dtype = pick.choice(list(FAMILIES)), pick.choice(DTYPES)
    if pick.random() < 0.3:  # so few pages that requests are computed again
        engine = native_engine(model_of(family)[0], dtype=dtype, options=NativeOptions(packed=options["packed"]))
        options["cache_bytes"] = 14 * engine._backend.page_bytes
    names = pick.sample([None, *LORAS], pick.randint(1, 4))
    return AdaptedTexts(family, dtype, number).generate(family, names=names, **options)


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("number", quick(range(DRAWS), range(QUICK)))
def test_a_draw(number):
    assert draw(number).differ() == 0


FAULTS = {
    "products by torch": lambda m: m.setattr(
        low_rank,
        "exact_low_rank",
        lambda x, w, bias, ab, scale, parts: (
            exact_linear(x, w, bias, parts, False) + scale * (x @ ab[0].T) @ ab[1].T,
            None,
        ),
    ),
    "the scale after the second factor": lambda m: m.setattr(
        low_rank,
        "exact_low_rank",
        lambda x, w, bias, ab, scale, parts: (
            exact_linear(x, w, bias, parts, False)
            + scale * exact_linear(exact_linear(x, ab[0], None, parts, False), ab[1], None, 1, False),
            None,
        ),
    ),
    "the first factor in one part": lambda m: m.setattr(
        low_rank,
        "exact_low_rank",
        lambda x, w, bias, ab, scale, parts: (
            exact_linear(x, w, bias, parts, False)
            + exact_linear(scale * exact_linear(x, ab[0], None, 1, False), ab[1], None, 1, False),
            None,
        ),
    ),
    "merged weights": lambda m: m.setattr(
        low_rank,
        "exact_low_rank",
        lambda x, w, bias, ab, scale, parts: (exact_linear(x, w + scale * ab[1] @ ab[0], bias, parts, False), None),
    ),
}


@pytest.mark.parametrize("fault", quick(FAULTS, ["the first factor in one part", "merged weights"]))
def test_a_planted_fault_is_found(fault, monkeypatch):
    """In float32 the engine is right and the trainer is not."""
    right = [AdaptedTexts(family, torch.float32, 3).generate(family) for family in ("qwen3", "odd sizes")]
    assert sum(texts.differ() for texts in right) == 0
    FAULTS[fault](monkeypatch)
    assert sum(texts.differ() for texts in right) > 0


ON_RANKS = [("llama, scaled", torch.bfloat16), ("gemma2", torch.float64)]


@pytest.mark.gloo
@pytest.mark.parametrize("case", quick(ON_RANKS, ON_RANKS[:1]), ids=str)
def test_the_bits_do_not_depend_on_tensor_ranks(case):
    """Texts of an engine on one rank are those of an engine on all, scored there with and without a split stream."""
    family, dtype = case
    alone = AdaptedTexts(family, dtype, 5).generate(family)

    def program(mesh):
        ours = AdaptedTexts(family, dtype, 5).generate(family, mesh)
        return alone.differ(mesh), alone.differ(mesh, splits=True), unlike(ours.all_done, alone.all_done)

    assert launch(program, parse("tp2"), "cpu") == (0, 0, 0)


def completions(engine, requests):
    """Tokens and both log-probabilities of requests, by number."""
    return {done.number: (done.tokens, done.sampling_logp, done.raw_logp) for done in complete(engine, requests)}


def same(ones, others):
    return ones.keys() == others.keys() and all(
        torch.equal(*pair) for n in ones for pair in zip(ones[n], others[n], strict=True)
    )


def some_requests(names, samples=2, prompt=range(3, 37), new_tokens=12, stop=()):
    """Requests of one prompt by turns with adapters of these names."""
    sampling = Sampling(max_new_tokens=new_tokens, samples=samples, stop=stop)
    requests = requests_of([list(prompt)] * len(names), sampling, seed=7)
    return [request._replace(adapter=names[i // samples]) for i, request in enumerate(requests)]


@pytest.mark.parametrize("options", [{}, {"packed": False}, {"packed": False, "static": True}, {"speculate": 3}])
def test_a_request_has_the_bits_of_a_batch_with_its_adapter_alone(options):
    names = ["all", None, "some", "wide", None, "all"]
    requests = some_requests(names)
    together = completions(engine_with("qwen3", LORAS, **options), requests)
    for name in {*names}:
        engine = engine_with("qwen3", [name] if name else [], **options)
        own = [request for request in requests if request.adapter == name]
        alone = completions(engine, own)
        assert same(alone, {n: item for n, item in together.items() if n in alone})
    tokens = {tuple(together[i][0].tolist()) for i in (0, 2, 4, 6)}
    assert len(tokens) == 4


def test_texts_of_different_adapters_share_no_pages():
    engine = engine_with("llama", LORAS, max_rows=8)
    engine.reserve(1000)
    first = some_requests(["all"], samples=1)
    complete(engine, first)
    counts = [engine.cost().cached]
    for name in ("some", None, "all", "all"):
        complete(engine, [first[0]._replace(adapter=name)])
        counts.append(engine.cost().cached)
    assert counts[0] == counts[1] == counts[2] == 0 and counts[3] == counts[4] - counts[3] == 32
    together = engine_with("llama", LORAS, max_rows=8)
    complete(together, some_requests([None, "all", "all", "some"], samples=2))
    assert together.cost().prefilled == 3 * 34  # once for each adapter, and for the base


def test_tokens_have_the_version_of_their_adapter_and_go_on_with_a_newer_one():
    engine = engine_with("llama", ["all", "some"])
    requests = some_requests(["all", "some", None], samples=1, new_tokens=9)
    engine.submit(requests)
    done = []
    for _ in range(4):
        done += engine.step()
    load_adapter(engine, "llama", "all", 20, factor=1.5)
    while engine.unfinished():
        done += engine.step()
    versions = {completion.number: completion.versions.tolist() for completion in done}
    assert versions[0] == [10] * 4 + [20] * 5
    assert versions[1] == [11] * 9 and versions[2] == [5] * 9
    fresh = engine_with("llama", ["all", "some"])
    untouched = completions(fresh, requests[1:])
    assert same(
        untouched, {item.number: (item.tokens, item.sampling_logp, item.raw_logp) for item in done if item.number}
    )
    begun = next(request for request in done if request.number == 0)
    begun = begun._replace(**{x: getattr(begun, x)[:4] for x in ("tokens", "sampling_logp", "raw_logp", "versions")})
    load_adapter(fresh, "llama", "all", 20, factor=1.5)
    again = complete(fresh, [requests[0]._replace(begun=begun)])[0]
    whole = next(element for element in done if element.number == 0)
    assert torch.equal(again.tokens, whole.tokens) and torch.equal(again.raw_logp, whole.raw_logp)


def test_a_base_that_is_loaded_later_keeps_the_adapters():
    for packed in (True, False):
        engine = engine_with("llama", ["all"], packed=packed)
        requests = some_requests(["all", None], samples=1)
        before = completions(engine, requests)
        engine.load([(name, x.clone()) for name, x in engine.held_weights()], 6)
        assert same(completions(engine, requests), before)
        assert complete(engine, requests)[0].versions.unique().tolist() == [10]


def test_an_adapter_that_an_engine_lacks_is_named():
    engine = engine_with("llama", ["all", "some"])
    requests = some_requests(["wide"])
    with pytest.raises(ValueError, match=r"request 0 names the adapter 'wide', .* it has 'all', 'some'; load_adapter"):
        engine.submit(requests)
    assert engine.unfinished() == 0
    with pytest.raises(ValueError, match="this engine lacks: it has none"):
        engine_with("llama", []).submit(requests)
    engine.submit(some_requests(["all"]))
    with pytest.raises(ValueError, match="request 0 is unfinished and names the adapter 'all'"):
        engine.drop_adapter("all")
    engine.cancel(range(9))
    engine.drop_adapter("all")
    with pytest.raises(ValueError, match="it has 'some'"):
        engine.submit(some_requests(["all"]))


def test_factors_that_do_not_fit_leave_the_adapter_as_it_was():
    engine = engine_with("llama", ["all"])
    requests = some_requests(["all"])
    before = completions(engine, requests)
    held = dict(engine.held_adapter("all"))
    wrong = held | {"layers/0/attn/q_lora_a": torch.zeros(5, 64)}
    with pytest.raises(ModelError, match=r"q_lora_a has shape \[5, 64\], rank 0 holds \[4, 64\]"):
        engine.load_adapter("all", LORAS["all"], wrong.items(), 11)
    with pytest.raises(ModelError, match="an adapter of qkvz, none of which the model has"):
        engine.load_adapter("all", Lora(1, 1.0, ("qkvz",)), held.items(), 11)
    assert engine.adapters["all"].version == 10 and same(completions(engine, requests), before)
    with pytest.raises(RuntimeError, match="load the base before its adapters"):
        load_adapter(native_engine(model_of("llama")[0]), "llama", "all")


@pytest.mark.parametrize(
    "sizes",
    [
        {"kv_heads": 4, "head": 6, "latent": LatentSizes(8, 8, 4, 2, 4)},
        {"experts": Experts(count=4, per_token=2, mlp=8, shared=8)},
        {"qk_norm": True, "qk_norm_over": "projection"},
    ],
    ids=["latent attention", "shared experts", "norms over all heads"],
)
def test_models_without_the_promise_mix_adapters_too(sizes):
    """Where engine and trainer may round differently they agree to 1e-12 in float64."""
    common = {"vocab": 40, "embed": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head": 8, "mlp": 48}
    plain = decoder_model(decoder_config(**(common | sizes)))
    params = plain.init(torch.Generator().manual_seed(0), torch.float64)
    engine = native_engine(plain, dtype=torch.float64)
    engine.load(engine.weights.named(params))
    last = {name.rsplit("/", 1)[-1] for name, _ in trees.named(plain.shapes)}
    several = last & {"q_a", "q_b", "kv_a", "kv_b", "o", "q", "shared_up", "shared_down", "down"}
    weights = {None: (plain, params)}
    for name, targets in {"some": tuple(sorted(several)), "one": tuple(sorted(several))[:1]}.items():
        lora = Lora(2, 4.0, targets)
        model = with_lora(plain, lora)
        own = trained_part(model, model.init(torch.Generator().manual_seed(1), torch.float64))
        own = trees.map(lambda x: x + 0.2, own)
        engine.load_adapter(name, lora, engine.adapter_weights(lora).named(own))
        weights[name] = model, on_base(model, params, own)
    requests = some_requests(["some", None, "one"], prompt=range(5, 25))
    for request, done in zip(requests, complete(engine, requests), strict=True):
        model, own = weights[request.adapter]
        tokens = torch.tensor([*request.prompt, *done.tokens.tolist()])
        logits = model.apply(own, Inputs(tokens[None])).hidden[0] @ model.unembed(own).T
        expected = logits.log_softmax(-1)[len(request.prompt) - 1 : -1].gather(1, done.tokens[:, None])[:, 0]
        assert (done.raw_logp - expected).abs().max() < 1e-12
