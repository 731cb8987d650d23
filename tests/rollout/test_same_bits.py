"""Engine and trainer compute the same bits: a draw of models, requests and packings, and faults that it must find.

A draw is a number; `python -m pytest tests/rollout/test_same_bits.py -k "draw and 17"` runs one alone.
"""

import functools
import itertools
import random

import pytest
import torch

from funrl import trees
from funrl.batch import Batch
from funrl.compiled_kernels import linear, linear_logprob, norm, paged_attention, rotary, varlen_attention
from funrl.compiled_kernels.exact import gate
from funrl.compiled_kernels.kernel_library import library_problem
from funrl.mesh.collectives import all_gather
from funrl.mesh.launch import launch
from funrl.mesh.mesh import SINGLE, parse
from funrl.mesh.rules import GENERATE, layouts, shard
from funrl.models import decoder_config, decoder_model, split_residual
from funrl.models.decoder import row_parallel
from funrl.models.decoder.layers import RopeScaling
from funrl.models.placed import place
from funrl.rollout.engine import complete
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.requests import requests_of
from funrl.rollout.sampling_parameters import Sampling

pytestmark = pytest.mark.skipif(library_problem() is not None, reason=str(library_problem()))
DRAWS, QUICK = 300, 25
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
FAMILIES = {
    "llama": {},
    "llama, scaled": {"tied": True, "rope_scaling": RopeScaling("llama3", 4.0, original=32)},
    "qwen2": {"family": "qwen2", "attention_bias": True, "output_bias": True, "windows": (None, 7)},
    "qwen3": {"family": "qwen3", "qk_norm": True, "head": 32},
    "odd sizes": {"vocab": 101, "embed": 90, "heads": 6, "head": 10, "mlp": 77, "windows": (9, None)},
    "gemma2": {
        "norms": "sandwich", "norm_offset": 1.0, "activation": "gelu", "attention_cap": 5.0, "logit_cap": 3.0,
        "windows": (9, None), "embed_scale": 8.0, "attention_scale": 0.3,
    },
    "granite": {"residual_scale": 0.5, "logit_divisor": 2.0, "embed_scale": 3.0},
    "partly rotated": {"rotary_part": 8, "qk_norm": True},
}  # fmt: skip


@functools.cache
def model_of(family):
    sizes = {"vocab": 136, "embed": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head": 16, "mlp": 96}
    model = decoder_model(decoder_config(**(sizes | FAMILIES[family])))
    params = model.init(torch.Generator().manual_seed(0), torch.float64)
    return model, trees.map_named(lambda name, x: x * (20 if name in ("embed", "unembed") else 1), params)


class Texts:
    """Completions of an engine: prompts, tokens and the engine's log-probabilities."""

    def __init__(self, family, dtype, seed):
        self.pick = random.Random(seed)
        self.model, self.params = model_of(family)
        self.dtype = dtype
        self.temperature = self.pick.choice([1.0, 1.0, 0.7, 1.3])

    def generate(self, mesh=SINGLE, **options):
        """Complete random prompts, some of them alike, in a random order, some in two goes."""
        pick, vocab = self.pick, self.model.config.vocab
        prompts = [
            [pick.randrange(vocab) for _ in range(pick.choice([1, 3, 16, 17, 40]))] for _ in range(pick.randint(1, 5))
        ]
        prompts = [pick.choice(prompts) * pick.choice([1, 1, 2]) for _ in range(len(prompts) + 1)]
        sampling = Sampling(
            max_new_tokens=pick.choice([1, 8, 24]), temperature=self.temperature, samples=pick.randint(1, 8)
        )
        requests = requests_of(prompts, sampling, seed=pick.randrange(99))
        pick.shuffle(requests)
        engine = native_engine(self.model, mesh, self.dtype, NativeOptions(**options))
        params = shard(self.params, layouts(self.model.shapes, self.model.axes, GENERATE, sizes=mesh.sizes), mesh)
        engine.load(engine.weights.named(params), 1)
        first = [request._replace(most=pick.choice([None, 3])) for request in requests]
        done = complete(engine, first)
        paused = [i for i, completion in enumerate(done) if completion.finish == "paused"]
        again = complete(engine, [requests[i]._replace(begun=done[i], most=None) for i in paused])
        for i, completion in zip(paused, again, strict=True):
            done[i] = completion
        self.prompts = [list(request.prompt) for request in requests]
        self.done = done
        return self

    def scores(self, mesh=SINGLE, temperature=None, **options):
        """The trainer's log-probabilities of each completion, in random micro-batches with some padding."""
        pick, found = random.Random(self.temperature), {}
        placed = place(self.model, mesh, dtype=self.dtype, **options)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        params = shard(trees.map(lambda x: x.to(wide), self.params), placed.stored, mesh)
        numbers = list(range(len(self.done)))
        pick.shuffle(numbers)
        while numbers:
            some = [numbers.pop() for _ in range(min(len(numbers), pick.randint(1, 9)))]
            batch, parts = self.packed(some, pick.choice([0, 3]) + 8)
            with torch.no_grad():
                scores = placed.token_scores(params, batch, temperature=temperature or self.temperature)
            assert scores.logp is not None
            found |= {i: scores.logp[0, part] for i, part in parts.items()}
        return [found[i] for i in range(len(self.done))]

    def packed(self, some, multiple):
        texts = {i: self.prompts[i] + self.done[i].tokens.tolist() for i in some}
        lengths = torch.tensor([len(text) for text in texts.values()])
        padding = -int(lengths.sum()) % multiple
        tokens = torch.tensor([*itertools.chain.from_iterable(texts.values()), *[0] * padding])[None]
        positions = torch.cat([torch.arange(n) for n in (*lengths.tolist(), padding)])[None]
        segments = torch.repeat_interleave(torch.arange(len(some) + 1), torch.tensor([*lengths.tolist(), padding]))
        segments = (segments + 1) % (len(some) + 1)
        offsets = torch.tensor([0, *lengths.tolist()]).cumsum(0).int()
        mask, parts = torch.zeros_like(tokens, dtype=torch.bool), {}
        for i, start, end in zip(some, offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            parts[i] = slice(start + len(self.prompts[i]), end)
            mask[0, parts[i]] = True
        return Batch(tokens=tokens, positions=positions, segments=segments[None], offsets=offsets, mask=mask), parts

    def differ(self, mesh=SINGLE, **options):
        """How many tokens the trainer and the engine give different bits, raw or at the temperature; of all."""
        drawn, raw = self.scores(mesh, **options), self.scores(mesh, 1.0, **options)
        engine = [*(x.sampling_logp for x in self.done), *(x.raw_logp for x in self.done)]
        pairs = [*zip([*drawn, *raw], engine, strict=True)]
        assert all(torch.isfinite(x).all() for pair in pairs for x in pair)
        return sum(int((a != b).sum()) for a, b in pairs)


def draw(number):
    """Number of a draw -> texts of an engine."""
    pick = random.Random(number)
    torch.set_num_threads(pick.choice([1, 2]))
    options = {"packed": pick.choice([True, True, False]), "speculate": pick.choice([0, 0, 3])}
    options["max_rows"] = pick.choice([1, 3, 512])
    texts = Texts(pick.choice(list(FAMILIES)), pick.choice(DTYPES), number)
    if pick.random() < 0.3:  # so few pages that requests are computed again
        engine = native_engine(texts.model, dtype=texts.dtype, options=NativeOptions(packed=options["packed"]))
        options["cache_bytes"] = 14 * engine._backend.page_bytes
    return texts.generate(**options)


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("number", [pytest.param(i, marks=[pytest.mark.slow] * (i >= QUICK)) for i in range(DRAWS)])
def test_a_draw(number):
    assert draw(number).differ() == 0


def merged_split(monkeypatch):
    monkeypatch.setattr(row_parallel, "parts_of", lambda size: 1)


def by_torch(module):
    return lambda monkeypatch: monkeypatch.setattr(module, "computes_exactly", lambda *_: False)


FAULTS = {
    "attention by torch, whose order of keys is another": by_torch(varlen_attention),
    "attention over pages by torch": by_torch(paged_attention),
    "products by MKL": by_torch(linear),
    "norms by torch": by_torch(norm),
    "rotations by torch": by_torch(rotary),
    "gates by torch": by_torch(gate),
    "normalizers by torch": by_torch(linear_logprob),
    "a merged split": merged_split,
    "one product in one part by MKL": lambda m: m.setattr(
        row_parallel, "linear_in_parts", lambda x, w, parts, wide=False: torch.nn.functional.linear(x, w)
    ),
    "half of a product's terms first": lambda m: m.setattr(
        row_parallel, "linear_in_parts",
        lambda x, w, parts, wide=False: sum(
            torch.nn.functional.linear(a, b) for a, b in zip(x.chunk(2, -1), w.chunk(2, 1), strict=True)
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, monkeypatch):
    """In float32, by some of the first draws, where the engine is right and the trainer is not, or the other way."""
    right = [(family, Texts(family, torch.float32, 3).generate()) for family in ("qwen3", "odd sizes")]
    FAULTS[fault](monkeypatch)
    wrong = Texts("granite", torch.float32, 4).generate() if "pages" in fault else None
    if wrong is not None:
        monkeypatch.undo()
    assert (wrong.differ() if wrong is not None else sum(texts.differ() for _, texts in right)) > 0


@pytest.mark.gloo
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_bits_do_not_depend_on_tensor_ranks(ranks):
    """Texts of an engine on one rank and on all, scored on one rank and on all, with and without a split stream."""
    families = ["llama", "qwen3"] if ranks == 4 else ["llama, scaled", "qwen2", "qwen3", "gemma2"]
    cases = [(family, dtype) for family in families for dtype in DTYPES]

    def program(mesh):
        counts = {}
        for family, dtype in cases:
            alone = Texts(family, dtype, 5).generate()
            ours = Texts(family, dtype, 5).generate(mesh)
            counts[family, dtype] = [
                alone.differ(mesh),
                alone.differ(mesh, splits=True),
                ours.differ(),
                ours.differ(mesh),
            ]
        return counts

    found = launch(program, parse(f"tp{ranks}"), "cpu")
    assert found == {case: [0] * 4 for case in cases}


@pytest.mark.gloo
def test_a_sum_by_ranks_in_turn_is_found():
    """Four ranks that add one after the other, and not by the tree, give other bits."""

    def program(mesh):
        alone = Texts("llama", torch.float32, 5).generate()
        pairwise = split_residual.psum_pairwise

        def in_turn(x, mesh, axes):
            return functools.reduce(torch.add, all_gather(x[None], mesh, axes).unbind(0))

        right = alone.differ(mesh)
        split_residual.psum_pairwise = in_turn
        wrong = alone.differ(mesh)
        split_residual.psum_pairwise = pairwise
        return right, wrong

    right, wrong = launch(program, parse("tp4"), "cpu")
    assert right == 0 and wrong > 0
