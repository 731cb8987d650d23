"""Every pair of the ways in which rows are written runs, and split ranks have the numbers of shared ones.

Rows of vLLM and of generators on Ray run in their own environments.
"""

import importlib.util
import json

import pytest
import torch
from ray_cluster import on_ray
from row_pairs import (
    FILE,
    MARKS,
    PAGE,
    PLACES,
    all_pairs,
    alone,
    environment_of,
    job_of,
    page_of,
    pairs_of,
    refusal_of,
    run,
    write_files,
)
from selection import quick
from small_runs import MEASURED
from test_ray_generators import trained

from funrl import trees

pytestmark = pytest.mark.gloo
ROWS = json.loads(FILE.read_text())
VLLM, RAY, BOTH, EVERYWHERE = (
    [number for number, row in enumerate(ROWS) if environment_of(row) == name]
    for name in ("vllm", "ray", "vllm and ray", None)
)
VLLM.sort(key=lambda number: -list(PLACES).index(ROWS[number]["place"]))  # after shared ranks no process can fork
NATIVE = [number for number in EVERYWHERE if ROWS[number]["engine"] == "native"]  # those of quick tests
SAME = {"native": 0.0, "hf": 1e-5, "vllm": 1e-5}
OWN = ("memory/", "sync/", "time_s/", "wait/", "places/", "age/")  # metrics of ranks and of time
NO_VLLM = importlib.util.find_spec("vllm") is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("pairs"))


def listed():
    """The table of the page."""
    return PAGE.read_text().split(MARKS[0])[1].split(MARKS[1])[0]


def name_of(row):
    return "-".join(name if value is True else str(value) for name, value in ROWS[row].items() if value)


def numbers(steps):
    """Metrics of all steps that depend on neither ranks nor time."""
    return [
        {name: x for name, x in metrics.items() if not name.startswith(OWN) and not name.endswith(MEASURED)}
        for _, metrics in steps
    ]


def check_row(ways, folder, result=None):
    """Run a row of the array, unless its result is given, and where it is split, the same on shared ranks."""
    outcome, observer, weights = result or run(job_of(folder, ways))
    assert outcome.error is None and len(observer.steps) == 2
    assert all(metrics["actor/grad_norm"] > 0 for _, metrics in observer.steps)
    staleness = PLACES[ways["place"]].get("staleness", 0)
    if staleness:
        assert max(metrics["age/max"] for _, metrics in observer.steps) <= staleness
    if staleness or ways["place"] == "shared":
        return
    other, beside, own_weights = run(job_of(folder, ways | {"place": "shared"}))
    assert other.error is None and observer.shown == beside.shown and observer.table == beside.table
    merged = ways["place"] == "ray" and ways["adapters"]  # whose bits are others
    tolerance = max(SAME[ways["engine"]], 1e-9 if merged else 0.0)
    for numbers_apart, numbers_together in zip(numbers(observer.steps), numbers(beside.steps), strict=True):
        assert numbers_apart == pytest.approx(numbers_together, rel=tolerance, abs=tolerance, nan_ok=True)
    for x, y in zip(trees.leaves(weights), trees.leaves(own_weights), strict=True):
        assert torch.allclose(x, y, rtol=0, atol=tolerance)


@pytest.mark.parametrize("row", quick(EVERYWHERE, NATIVE), ids=name_of)
def test_a_row_of_pairs_runs_and_has_the_numbers_of_ranks_that_do_both(row, folder):
    check_row(ROWS[row], folder)


@pytest.mark.skipif(NO_VLLM, reason="no vLLM here: ./test --all makes .venv-vllm for it")
@pytest.mark.parametrize("row", VLLM, ids=name_of)
def test_a_row_of_vllm_runs_and_has_the_numbers_of_ranks_that_do_both(row, folder):
    check_row(ROWS[row], folder)


@on_ray
@pytest.mark.parametrize("row", [*RAY, *BOTH], ids=name_of)
def test_a_row_of_generators_elsewhere_runs_and_has_the_numbers_of_ranks_that_do_both(
    row, folder, ray_cluster, tmp_path
):
    if row in BOTH and NO_VLLM:
        pytest.skip("no vLLM here: ./test --all makes .venv-vllm for it")
    job = job_of(folder, ROWS[row])
    check_row(ROWS[row], folder, trained(job, tmp_path / "run", ray_cluster))


@pytest.mark.slow
def test_the_array_has_each_pair_that_is_not_refused_and_the_page_the_others(folder):
    refused = {pair: message for pair in all_pairs() if (message := refusal_of(folder, alone(pair)))}
    covered = set().union(*map(pairs_of, ROWS))
    assert {pair for pair in all_pairs() if pair not in covered} == refused.keys()
    assert listed() == page_of(refused).replace(str(folder), "DIR")
