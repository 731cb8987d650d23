"""Texts of an engine, and the trainer's log-probabilities of them, on one mesh after the other."""

import functools
import itertools
import random

import torch
from drawn_bits import FAMILIES, SIZES

from funrl import trees
from funrl.batch import Batch
from funrl.mesh.mesh import SINGLE
from funrl.mesh.rules import GENERATE, layouts, shard
from funrl.models import decoder_config, decoder_model
from funrl.models.placed import place
from funrl.rollout.engine import complete
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.requests import requests_of
from funrl.rollout.sampling_parameters import Sampling


@functools.cache
def model_of(family):
    model = decoder_model(decoder_config(**(SIZES | FAMILIES[family])))
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
            max_new_tokens=pick.choice([1, 6, 12]), temperature=self.temperature, samples=pick.randint(1, 3)
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
        pick, results = random.Random(self.temperature), {}
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
            results |= {i: scores.logp[0, part] for i, part in parts.items()}
        return [results[i] for i in range(len(self.done))]

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
        drawn = self.scores(mesh, **options)
        raw = drawn if self.temperature == 1.0 else self.scores(mesh, 1.0, **options)
        engine = [*(x.sampling_logp for x in self.done), *(x.raw_logp for x in self.done)]
        pairs = [*zip([*drawn, *raw], engine, strict=True)]
        assert all(torch.isfinite(x).all() for pair in pairs for x in pair)
        return sum(int((a != b).sum()) for a, b in pairs)


def unlike(ones, others):
    """How many completions of two engines have other tokens or bits."""
    fields = ("tokens", "sampling_logp", "raw_logp")
    pairs = zip(ones, others, strict=True)
    return sum(not all(torch.equal(getattr(a, name), getattr(b, name)) for name in fields) for a, b in pairs)
