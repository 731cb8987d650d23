"""Prompts in the native engine whose pictures' tokens see one another: a pass has all of a picture, or nothing."""

import itertools

import pytest
import torch

from funrl.batch import Batch, declare
from funrl.kinds import owned_lines
from funrl.models import decoder_config, decoder_model, place
from funrl.models.vision.config import PictureLayout, TowerConfig, TowerForm
from funrl.models.vision.model import with_vision
from funrl.rollout.engine import complete
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.requests import Request
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.steps.step_rows import owned_fields, ragged

PLACEHOLDER = 23
SIDE, TOKENS = 12, 36  # of a picture: patches of a side, and tokens, more than two pages
TOWER = TowerConfig(
    layers=1,
    embed=12,
    heads=2,
    inner=16,
    patch=2,
    window=None,
    placeholder=PLACEHOLDER,
    form=TowerForm(
        norm="layer",
        gated=False,
        patch_bias=True,
        table=SIDE,
        frames=1,
        joined=False,
        rotates=False,
        merger="mean",
    ),
    layout=PictureLayout(side=SIDE, mutual=True),
)
GREEDY = Sampling(max_new_tokens=3, greedy=True)


@pytest.fixture(scope="module")
def seeing():
    sizes = {"vocab": 24, "embed": 16, "layers": 2, "heads": 4, "kv_heads": 2, "head": 4, "mlp": 16}
    config = decoder_config(**sizes, windows=(20, None), local_rope_theta=100.0, max_positions=512)
    model = with_vision(decoder_model(config), TOWER)
    params = model.init(torch.Generator().manual_seed(0), torch.float64)
    params["embed"] *= 40
    return model, params


def pictures(*seeds):
    patches = [
        torch.randint(0, 256, (SIDE**2, 3, 2, 2), generator=torch.Generator().manual_seed(s), dtype=torch.uint8)
        for s in seeds
    ]
    return owned_lines({"patches": torch.cat(patches), "grids": torch.tensor([[SIDE, SIDE]] * len(seeds))})


def prompt(*texts):
    """Texts of some tokens, with a picture between two of them."""
    parts = [[3 + i % 9 for i in range(count)] for count in texts]
    return list(itertools.chain(parts[0], *([PLACEHOLDER] * TOKENS + part for part in parts[1:])))


def engine_of(model, params, budget=None, **options):
    engine = native_engine(model, dtype=torch.float64, options=NativeOptions(cache_bytes=1 << 22, **options))
    engine.load(engine.weights.named(params), version=0)
    engine._scheduler._pass_tokens = budget or engine._scheduler._pass_tokens
    return engine


def trainer_logp(model, params, request, completion):
    tokens = torch.tensor([[*request.prompt, *completion.tokens.tolist()]])
    batch = Batch(tokens=tokens, mask=torch.arange(tokens.shape[1]).unsqueeze(0) >= len(request.prompt))
    fields = {name: ragged([x], x[:0]) for name, x in request.owned.values.items()}
    batch = declare(batch, owned_fields(request.owned.values))._replace(**fields)
    return place(model, dtype=torch.float64).token_scores(params, batch).logp[0, len(request.prompt) :]


def chunks_of(engine):
    """The chunks that passes compute from now on, as (begin, end) in their texts."""
    seen = []
    forward = engine._backend.forward

    def recorded(work):
        seen.extend((int(end - count), int(end)) for count, end in zip(work.counts, work.ends, strict=True))
        return forward(work)

    engine._backend.forward = recorded
    return seen


@pytest.mark.parametrize("budget", [1, 20, 50, None])
def test_completions_have_the_trainers_log_probabilities_at_any_size_of_passes(seeing, budget):
    model, params = seeing
    asked = [
        Request(0, prompt(5, 1, 1), GREEDY, seed=0, owned=pictures(1, 2)),
        Request(1, prompt(0, 0, 1), GREEDY, seed=1, owned=pictures(3, 1)),
        Request(2, [3, 4, 5], GREEDY, seed=2),
    ]
    engine = engine_of(model, params, budget, max_rows=8)
    chunks = chunks_of(engine)
    done = complete(engine, asked)
    for request, completion in zip(asked[:2], done[:2], strict=True):
        assert (completion.raw_logp - trainer_logp(model, params, request, completion)).abs().max() < 1e-11
    groups = {first for request in asked[:2] for first, _ in model.owned.whole(request.prompt)}
    assert groups == {5, 42, 0, 36}
    if budget in (1, 20):  # a picture is a chunk, which is larger than the budget
        assert {(first, first + TOKENS) for first in groups} <= set(chunks)


def test_a_known_prefix_that_ends_within_a_picture_is_cut_before_it(seeing):
    model, params = seeing
    engine = engine_of(model, params, max_rows=1)
    complete(engine, [Request(0, [3] * 200, GREEDY, seed=0)])  # the cache begins anew when it grows
    first = Request(1, prompt(20, 1), GREEDY, seed=1, owned=pictures(1))
    complete(engine, [first])
    again = Request(2, [*prompt(20, 0), 7, 8, 9], GREEDY, seed=2, owned=pictures(1))  # its pages end in the picture
    chunks = chunks_of(engine)
    (done,) = complete(engine, [again])
    assert chunks[0] == (16, len(again.prompt))  # of pages of 16 tokens
    assert (done.raw_logp - trainer_logp(model, params, again, done)).abs().max() < 1e-11
    other = Request(3, again.prompt, GREEDY, seed=2, owned=pictures(2))
    (changed,) = complete(engine, [other])
    assert (changed.raw_logp - trainer_logp(model, params, other, changed)).abs().max() < 1e-11
    assert not torch.equal(changed.raw_logp, done.raw_logp)


def test_a_conversation_continues_from_its_pages(seeing):
    model, params = seeing
    engine = engine_of(model, params, max_rows=1)
    complete(engine, [Request(0, [3] * 200, GREEDY, seed=0)])
    first = Request(1, prompt(3, 4), GREEDY, seed=1, owned=pictures(1))
    (done,) = complete(engine, [first])
    before = [*first.prompt, *done.tokens.tolist()]
    longer = Request(2, [*before, *prompt(2, 3)], GREEDY, seed=2, owned=pictures(1, 2), computed=len(before) - 1)
    (more,) = complete(engine, [longer])
    assert more.recomputed == 0
    assert (more.raw_logp - trainer_logp(model, params, longer, more)).abs().max() < 1e-11
