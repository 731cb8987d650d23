"""Engines whose pages and cells lie in lanes: the same completions, and no sequence with those of two lanes."""

import pytest
import torch

from funrl import trees
from funrl.mesh.mesh import SINGLE
from funrl.models import decoder_config, decoder_model
from funrl.models.decoder.gated_delta_net import GatedDeltaNet
from funrl.rollout.engine import complete
from funrl.rollout.native.backends import TorchBackend
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.native.lanes import LanePages, lane_room
from funrl.rollout.requests import Request
from funrl.rollout.sampling_parameters import Sampling

SIZES = {"vocab": 40, "embed": 16, "heads": 4, "kv_heads": 2, "head": 4, "mlp": 32}
MODEL = decoder_model(decoder_config(**SIZES, layers=1))
WITH_STATES = decoder_model(decoder_config(**SIZES, layers=2, mixers=(GatedDeltaNet(2, 4, 8, 6), None)))


class LanedBackend(TorchBackend):
    """A backend in torch that says it has lanes."""

    def __init__(self, lanes, model, mesh, dtype, page_tokens):
        super().__init__(model, mesh, dtype, None, page_tokens)
        self.lanes = lanes


def engine_of(lanes, pages, rows=6, model=MODEL, cells=0):
    room = pages * model.page_bytes(SINGLE, 16, torch.float64) + cells * model.cell_bytes(SINGLE, torch.float64)
    options = NativeOptions(rows, room, make_backend=lambda *given: LanedBackend(lanes, *given))
    engine = native_engine(model, SINGLE, torch.float64, options._replace(snapshot_tokens=16 * (cells > 0)))
    params = trees.cast(model.init(torch.Generator().manual_seed(0)), torch.float64)
    engine.load(trees.named(params))
    return engine


def requests():
    """Groups of 4, 4 and 1 completions; two prompts begin alike, and one continues another."""
    generator = torch.Generator().manual_seed(1)
    long = torch.randint(0, 40, (39,), generator=generator).tolist()
    prompts = [[1, 2, 3]] * 4 + [long] * 4 + [[*long, 5]]
    return [Request(i, prompt, Sampling(max_new_tokens=20 + i, stop=(3,)), i) for i, prompt in enumerate(prompts)]


def lanes_met(engine):
    """Lanes of the running sequences, after a check that each is in one."""
    each = engine._scheduler.pool.lanes[0].pages
    cells = engine._scheduler.cells.lanes[0].cells
    for sequence in engine._scheduler._running:
        assert {page // each for page in sequence.pages} == {sequence.lane}
        assert not cells or sequence.cell // cells == sequence.lane
    return [sequence.lane for sequence in engine._scheduler._running]


@pytest.mark.parametrize("lanes,pages", [(2, 40), (2, 10), (3, 30)], ids=["roomy", "preempting", "three"])
def test_completions_do_not_depend_on_lanes(lanes, pages):
    wanted = complete(engine_of(1, 40), requests())
    engine = engine_of(lanes, pages)
    engine.submit(requests())
    done = []
    most = [0] * lanes
    while engine.unfinished():
        done += engine.step()
        met = lanes_met(engine)
        most = [max(n, met.count(lane)) for lane, n in enumerate(most)]
    assert most == [6 // lanes] * lanes  # rows are shared evenly, though groups are larger
    by_number = {x.number: x for x in done}
    for want in wanted:
        assert by_number[want.number].tokens.tolist() == want.tokens.tolist()
        torch.testing.assert_close(by_number[want.number].raw_logp, want.raw_logp, rtol=0, atol=1e-12)
    cost = engine.cost()
    assert cost.used_pages == 0 and (cost.preempted > 0) == (pages == 10)


@pytest.mark.slow
@pytest.mark.parametrize("cells", [40, 6], ids=["roomy", "few"])
def test_completions_of_a_model_with_states_do_not_depend_on_lanes(cells):
    wanted = complete(engine_of(1, 40, model=WITH_STATES, cells=40), requests())
    engine = engine_of(2, 12, model=WITH_STATES, cells=cells)
    engine.submit(requests())
    done = []
    met = set()
    while engine.unfinished():
        done += engine.step()
        met |= set(lanes_met(engine))
    assert met == {0, 1}
    for want, completion in zip(wanted, sorted(done, key=lambda x: x.number), strict=True):
        assert completion.tokens.tolist() == want.tokens.tolist()
        torch.testing.assert_close(completion.raw_logp, want.raw_logp, rtol=0, atol=1e-12)
    for pool in engine._scheduler.cells.lanes:
        left = sorted([*pool._free, *pool._snapshots.values()])
        assert left == list(range(left[0], left[0] + pool.cells)), "a cell was lost"


def test_a_turn_goes_to_the_lane_that_has_computed_its_begin():
    engine = engine_of(2, 40)
    first = [Request(i, [i + 1] * 20, Sampling(max_new_tokens=20, greedy=True), i) for i in range(3)]
    texts = [
        [*request.prompt, *done.tokens.tolist()] for request, done in zip(first, complete(engine, first), strict=True)
    ]
    for number, text in enumerate(texts):  # each begins alone, so that all lanes have room
        complete(engine, [Request(number, [*text, 7], Sampling(max_new_tokens=2), 0, computed=len(text) - 1)])
    assert engine.cost().recomputed == 0


def test_a_request_has_to_fit_in_one_lane():
    request = Request(0, [1] * 40, Sampling(max_new_tokens=60), 0)
    engine_of(1, 8).check([request])
    with pytest.raises(ValueError, match=r"100 tokens, 7 pages of keys and values; .* has 4: give it more"):
        engine_of(2, 8).check([request])


def test_lanes_have_even_shares_of_rows_and_pages():
    pages = LanePages(3, 11, 16)
    assert [pool.take(3) for pool in pages.lanes] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert (pages.pages, pages.used, pages.available, pages.peak) == (9, 9, 0, 9)
    assert lane_room(3, [], 7) == {0: 3, 1: 3, 2: 3} and lane_room(2, [], 0) == {}
