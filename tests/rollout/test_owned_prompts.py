"""Prompts with pictures in the native engine: their own keys, chunks, preemption, and tokens never sampled."""

import dataclasses
import itertools

import pytest
import torch

from funrl.batch import Batch, declare
from funrl.kinds import joined_lines, owned_lines
from funrl.models import decoder_config, decoder_model, place
from funrl.models.model import PromptPlaces
from funrl.models.vision.config import PictureLayout, TowerConfig, TowerForm
from funrl.models.vision.grids import picture_patches, picture_tokens
from funrl.models.vision.model import with_vision
from funrl.models.vision.tiles import NO_TILES, Tiles
from funrl.rollout.engine import complete
from funrl.rollout.native import owned_prompts
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.requests import Request
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.steps.step_rows import owned_fields, ragged

SIZES = {"vocab": 24, "embed": 16, "layers": 2, "heads": 4, "kv_heads": 2, "head": 4, "mlp": 16}
PLACEHOLDER, VIDEO = 22, 23
TOWER = TowerConfig(
    layers=2,
    embed=16,
    heads=2,
    inner=16,
    patch=4,
    window=16,
    whole_layers=(1,),
    placeholder=PLACEHOLDER,
    banned=(VIDEO,),
)
TILED_TOWER = dataclasses.replace(  # as that of LLaVA-OneVision
    TOWER,
    window=None,
    merge=1,
    form=TowerForm(table=2, rotates=False, merger="plain"),
    layout=PictureLayout(tiles=Tiles(pixels=9, states=2, canvases=((1, 2), (2, 1), (3, 3)), most=4)),
)
GREEDY = Sampling(max_new_tokens=12, greedy=True)


@pytest.fixture(scope="module")
def seeing():
    config = decoder_config(**SIZES, rope_axes=(0, 1), max_positions=512)
    model = with_vision(decoder_model(config), TOWER)
    params = model.init(torch.Generator().manual_seed(0), torch.float64)
    params["embed"] *= 40
    params["unembed"][[PLACEHOLDER, VIDEO]] *= 40  # without a ban they would be sampled
    return model, params


def pictures(seed, *grids, tower=TOWER):
    count = sum(picture_patches(grid, tower) for grid in grids)
    draw = torch.Generator().manual_seed(seed)
    patches = torch.randint(0, 256, (count, 3, 4, 4), generator=draw, dtype=torch.uint8)
    return owned_lines({"patches": patches, "grids": torch.tensor(grids, dtype=torch.int64).reshape(-1, 2)})


def prompt(*grids, text=(3, 4, 5), tower=TOWER):
    return [*itertools.chain(*([6] + [PLACEHOLDER] * picture_tokens(grid, tower) for grid in grids)), *text]


def engine_of(model, params, **options):
    engine = native_engine(model, dtype=torch.float64, options=NativeOptions(cache_bytes=1 << 22, **options))
    engine.load(engine.weights.named(params), version=0)
    return engine


def trainer_logp(model, params, request, completion):
    """Log-probabilities of a completion as the trainer scores it."""
    tokens = torch.tensor([[*request.prompt, *completion.tokens.tolist()]])
    mask = torch.arange(tokens.shape[1]).unsqueeze(0) >= len(request.prompt)
    batch = Batch(tokens=tokens, mask=mask)
    if request.owned is not None:
        fields = {name: ragged([x], x[:0]) for name, x in request.owned.values.items()}
        batch = declare(batch, owned_fields(request.owned.values))._replace(**fields)
    return place(model, dtype=torch.float64).token_scores(params, batch).logp[0, len(request.prompt) :]


def requests():
    same = prompt((6, 8), (2, 2))
    owned = [pictures(seed, (6, 8), (2, 2)) for seed in (1, 2, 1)]
    some = [Request(i, same, GREEDY, seed=i, owned=x) for i, x in enumerate(owned)]
    long = Request(3, prompt((16, 20), text=range(3, 20)), GREEDY, seed=3, owned=pictures(3, (16, 20)))
    return [*some, long, Request(4, [3, 4, 5], GREEDY, seed=4)]


@pytest.mark.parametrize("rows", [1, 8])
def test_completions_have_the_trainers_log_probabilities(seeing, rows):
    model, params = seeing
    asked = requests()
    for request, done in zip(asked, complete(engine_of(model, params, max_rows=rows), asked), strict=True):
        expected = trainer_logp(model, params, request, done)
        assert (done.raw_logp - expected).abs().max() < 1e-11
        assert done.tokens.max() < PLACEHOLDER


def test_prompts_of_equal_tokens_share_keys_only_with_equal_pictures(seeing):
    model, params = seeing
    engine = engine_of(model, params, max_rows=1)
    first, second, third, *_ = requests()
    a, b, c = (complete(engine, [request])[0] for request in (first, second, third))
    assert torch.equal(a.raw_logp, c.raw_logp) and not torch.equal(a.raw_logp, b.raw_logp)
    before = engine.cost().cached
    complete(engine, [first])
    assert engine.cost().cached > before


def test_tiles_of_a_picture_are_one_value():
    model = with_vision(decoder_model(decoder_config(**SIZES, max_positions=512)), TILED_TOWER)
    params = model.init(torch.Generator().manual_seed(0), torch.float64)
    params["embed"] *= 40
    sizes = ((40, 60), NO_TILES, (9, 30))  # the first is interpolated
    asked = [
        Request(i, prompt(*sizes, tower=TILED_TOWER), GREEDY, seed=i, owned=pictures(s, *sizes, tower=TILED_TOWER))
        for i, s in enumerate((1, 2, 1))
    ]
    assert len(asked[0].prompt) >= 3 * 16  # of several pages
    engine = engine_of(model, params, max_rows=1)
    a, b, c = (complete(engine, [request])[0] for request in asked)
    for request, done in zip(asked, (a, b, c), strict=True):
        assert (done.raw_logp - trainer_logp(model, params, request, done)).abs().max() < 1e-11
    assert torch.equal(a.raw_logp, c.raw_logp) and not torch.equal(a.raw_logp, b.raw_logp)
    before = engine.cost().cached
    complete(engine, asked[:1])
    assert engine.cost().cached > before
    assert len(engine._backend._owned._states) == 6  # each picture of the two prompts


def test_a_conversation_that_shows_another_picture_continues_from_its_pages(seeing):
    model, params = seeing
    first = Request(0, prompt((6, 8), text=range(3, 20)), GREEDY, seed=0, owned=pictures(1, (6, 8)))
    for shown, item in ((1, True), (2, False)):  # the second conversation had another first picture
        engine = engine_of(model, params, max_rows=1)
        complete(engine, [Request(0, [3] * 200, GREEDY, seed=0)])  # the cache begins anew when it grows
        (done,) = complete(engine, [first])
        before = [*first.prompt, *done.tokens.tolist()]
        both = joined_lines([pictures(shown, (6, 8)), pictures(3, (2, 2))])
        longer = Request(1, [*before, *prompt((2, 2))], GREEDY, seed=1, owned=both, computed=len(before) - 1)
        (more,) = complete(engine, [longer])
        assert (more.raw_logp - trainer_logp(model, params, longer, more)).abs().max() < 1e-11
        assert (more.recomputed == 0) == item and (engine.cost().cached >= len(before) - 1) == item


def test_new_weights_see_anew(seeing):
    model, params = seeing
    engine = engine_of(model, params)
    request = requests()[0]
    before = complete(engine, [request])[0]
    changed = {**params, "vision": model.init(torch.Generator().manual_seed(5), torch.float64)["vision"]}
    engine.load(engine.weights.named(changed), version=1)
    after = complete(engine, [request])[0]
    assert not torch.equal(before.raw_logp, after.raw_logp)
    assert (after.raw_logp - trainer_logp(model, changed, request, after)).abs().max() < 1e-11


def counting(model):
    """The model, and the digest of each picture that its tower is called for."""
    calls = []
    encode = model.owned.encode

    def counted(params, lines):
        calls.append(owned_lines(lines).digest)
        return encode(params, lines)

    return dataclasses.replace(model, owned=model.owned._replace(encode=counted)), calls


def test_all_places_of_a_prompt_count_to_their_bound():
    at_T, positions_T3, mutual_RM = (torch.zeros(shape, dtype=torch.int64) for shape in ((5,), (5, 3), (2, 2)))
    places = PromptPlaces(at_T, positions_T3, 0, (4,), mutual_RM)
    assert owned_prompts._bytes_of(owned_prompts.HeldPlaces(places, [7])) == 8 * (5 + 15 + 4)


def test_states_are_held_within_a_bound_and_freed_with_the_cache(seeing, monkeypatch):
    model, params = seeing
    expected = [done.raw_logp for done in complete(engine_of(model, params, max_rows=8), requests())]
    model, calls = counting(model)
    monkeypatch.setattr(owned_prompts, "MOST_STATE_BYTES", 1)
    monkeypatch.setattr(owned_prompts, "MOST_PLACE_BYTES", 1)
    engine = engine_of(model, params, max_rows=8)
    held = engine._backend._owned
    done = complete(engine, requests())
    assert all(torch.equal(x.raw_logp, y) for x, y in zip(done, expected, strict=True))
    assert len(held._states) == 1 and len(held._places) == 1 and len(calls) <= 7  # decoding makes none anew
    engine.pause()
    assert not held._states and not held._places and not held._shrinks


@pytest.mark.parametrize("cached", [True, False], ids=["continued", "computed anew"])
def test_the_tower_sees_each_picture_of_a_conversation_once(seeing, cached):
    model, params = seeing
    model, calls = counting(model)
    engine = engine_of(model, params, max_rows=1)
    shown = [pictures(seed, (6, 8)) for seed in (1, 2, 1, 3)]  # one of them twice
    tokens = []
    results = []
    for turn, count in ((0, 1), (1, 2), (2, 4)):
        tokens += [*itertools.chain(*(prompt((6, 8)) for _ in range(count - len(shown[:turn])))), 7]
        owned = joined_lines(shown[:count])
        known = len(tokens) - 1 if cached else 0
        asked = Request(turn, [*tokens], GREEDY, seed=turn, owned=owned, computed=0 if turn == 0 else known)
        if not cached:
            complete(engine, [Request(9, [3] * (300 + 100 * turn), GREEDY, seed=0)])  # the cache grows, and is dropped
        (done,) = complete(engine, [asked])
        results.append((asked, done))
        tokens += done.tokens.tolist()
    assert len(calls) == len(set(calls)) == 3
    for asked, done in results:
        assert (done.raw_logp - trainer_logp(model, params, asked, done)).abs().max() < 1e-11
        alone = complete(engine_of(model, params, max_rows=1), [asked._replace(number=0, computed=0)])[0]
        assert (done.raw_logp - alone.raw_logp).abs().max() < 1e-11
    engine.load(engine.weights.named(params), version=1)
    complete(engine, [results[-1][0]._replace(computed=0)])
    assert len(calls) == 6 + 6  # of the engines that saw all anew, and of the new weights


def test_numbers_of_ended_prompts_are_forgotten(seeing, monkeypatch):
    model, params = seeing
    expected = [done.raw_logp for done in complete(engine_of(model, params, max_rows=8), requests())]
    monkeypatch.setattr(owned_prompts, "MOST_SHRINKS", 1)  # fewer than run at once: they are computed again
    engine = engine_of(model, params, max_rows=8)
    done = complete(engine, requests())
    assert len(engine._backend._owned._shrinks) == 1
    assert all(torch.equal(x.raw_logp, y) for x, y in zip(done, expected, strict=True))


def test_a_model_of_text_refuses_pictures(seeing):
    plain = decoder_model(decoder_config(**SIZES))
    engine = engine_of(plain, plain.init(torch.Generator().manual_seed(0), torch.float64))
    with pytest.raises(ValueError, match="prompt 0 has pictures, and the model reads text only"):
        engine.submit([requests()[0]])


def test_entropy_and_collision_are_those_without_the_banned_tokens(seeing):
    model, params = seeing
    batch = Batch(tokens=torch.tensor([[3, 4, 5, 6, 7]]), mask=torch.tensor([[False, True, True, True, True]]))
    placed = place(model, dtype=torch.float64)
    want = ("logp", "entropy", "sum_pi_squared")
    got = placed.token_scores(params, batch, want, temperature=0.7, topk=torch.tensor([[[1, 2]] * 5]))
    logits = placed.logits(params, batch)
    logits[:, [PLACEHOLDER, VIDEO]] = -torch.inf
    logp = (logits / 0.7).log_softmax(-1)
    prob = logp.exp()
    entropy = -torch.where(prob > 0, prob * logp, 0).sum(-1)
    assert (got.logp[0, 1:] - logp.gather(1, batch.tokens[0, 1:, None])[:, 0]).abs().max() < 1e-9
    assert (got.entropy[0, 1:] - entropy).abs().max() < 1e-9
    assert (got.sum_pi_squared[0, 1:] - prob.square().sum(-1)).abs().max() < 1e-9
    assert (got.topk_logp[0, 1:] - logp[:, [1, 2]]).abs().max() < 1e-9
