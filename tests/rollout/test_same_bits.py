"""Engine and trainer compute the same bits: draws of models, meshes and requests, and faults that these must find.

A draw is a number; `python -m pytest tests/rollout/test_same_bits.py -k "draw and 17"` runs one alone.
"""

import pytest
import torch
from bit_faults import FAULTS
from drawn_bits import DTYPES, FAMILIES, compare, draw_of, gap_of, generate, on_this_rank
from lockstep_ranks import run_ranks
from selection import quick

from funrl.compiled_kernels.kernel_library import library_problem
from funrl.mesh.collectives import psum
from funrl.mesh.launch import launch
from funrl.mesh.mesh import parse

pytestmark = [pytest.mark.versions, pytest.mark.skipif(library_problem() is not None, reason=str(library_problem()))]
DRAWS, QUICK = 11, 5
MOST_DRAWS = 12  # within which a fault is found
ON_RANKS = [("tp2", 3), ("dp2,sp2", 2)]  # meshes, numbers of draws
ALONE = {"generate": "tp1", "train": "dp1,sp1,tp1", "threads": 1}


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("number", quick(range(DRAWS), range(QUICK)))
def test_a_draw(number):
    gap = gap_of(draw_of(number))
    assert gap.promised > 0 and gap.differ == 0


QUICK_FAULTS = (
    "attention by torch, whose order of keys is another",
    "products by MKL",
    "a bias after rounding",
    "a packed neighbour that leaks",
    "pages of old weights",
    "old tokens with the new version",
    "the log-probability of another row",
)


@pytest.mark.parametrize("fault", quick(FAULTS, QUICK_FAULTS))
def test_a_planted_fault_is_found(fault, monkeypatch):
    """By the first of the draws of its kind in which the two differ."""
    FAULTS[fault].plant(monkeypatch)
    assert any(gap_of(draw_of(number, **FAULTS[fault].fixed)).differ for number in range(MOST_DRAWS))


def test_tokens_of_other_weights_differ():
    """So the draws in which they do not count promise something."""
    assert sum(gap_of(draw_of(i, pause="other weights in flight", **ALONE)).stale for i in range(3)) > 0


@pytest.mark.parametrize("family", ["qwen3", "odd sizes", "gemma2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_and_padding_change_no_bits(family, dtype):
    """The same rows: alone, with neighbours in other orders, and with more or less padding."""
    draw = draw_of(7, **ALONE, family=family, dtype=dtype, samples=4, pause="no")
    written = generate(draw)
    packings = [(1, 8), (60, 1), (400, 61)]
    for number, (budget, multiple) in enumerate(packings):  # the number chooses the order
        drawn = draw._replace(number=number, budget=budget, multiple=multiple)
        assert compare(drawn, written).differ == 0


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("choice", quick(ON_RANKS, ON_RANKS[:1]), ids=str)
def test_real_ranks_have_the_same_bits(choice):
    """Draws in which these ranks generate, train, or do both."""
    mesh, draws = choice
    sizes = parse(mesh)
    tensor = f"tp{sizes['tensor']}"
    train = f"dp{sizes['data']},sp{sizes['sequence']},{tensor}"
    here = {name for name, x in FAMILIES.items() if x.get("vocab") is None}

    def program(mesh):
        run = on_this_rank(mesh)
        gaps = []
        for number in range(draws):
            meshes = {"train": train, "generate": tensor if number % 2 else "tp1"}
            draw = draw_of(number, **meshes, samples=2, new_tokens=6)
            if draw.family in here:
                gaps.append(gap_of(draw, run, run))
        return gaps

    gaps = launch(program, sizes, "cpu")
    assert len(gaps) > draws / 2 and all(gap.promised > 0 and gap.differ == 0 for gap in gaps)


def test_ranks_in_lockstep_that_wait_for_one_another_are_an_error():
    def program(mesh):
        return None if mesh.rank == 1 else psum(torch.ones(1), mesh, "tensor")

    with pytest.raises(RuntimeError, match="ranks wait for one another"):
        run_ranks(program, parse("tp4"))
