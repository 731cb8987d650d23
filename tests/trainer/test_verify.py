"""The proof of every sync in a run: its metrics and its time, what it stops, and the flags that ask for it."""

import functools
import itertools

import pytest
from small_runs import GRPO, Quiet, small_job

from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.rollout.certificate import SyncDigests
from funrl.rollout.native.engine import NativeEngine
from funrl.rollout.sync_proof import READ_AFTER
from funrl.trainer import loop, phases

WRONG = "layers/1/mlp/up"


class Timed(Quiet):
    """An observer that keeps the metrics of the proof and the phases that took time."""

    def __init__(self):
        super().__init__()
        self.reports, self.phases = [], []

    def step(self, step, metrics, seconds):
        super().step(step, metrics, seconds)
        self.reports.append({name: x for name, x in metrics.items() if name.startswith("sync/")})
        self.phases.append(set(seconds))


def run(mesh=None, **settings):
    """The observer and the outcome of a run of four steps."""
    job = small_job(GRPO, **{"steps": 4, "minibatches": 1, "eval_every": 4} | settings)
    observer = Timed()
    outcome = loop.train_loop(job, mesh or single(), observer)
    return observer, outcome


def test_every_step_is_verified_and_some_are_probed():
    observer, outcome = run(probe_sync_every=3)
    assert outcome.error is None
    assert [reports["sync/verified"] for reports in observer.reports] == [1.0] * 4
    gaps = [reports.get("sync/probe_gap") for reports in observer.reports]
    assert [gap is not None for gap in gaps] == [
        True,
        False,
        True,
        False,
    ]  # the first sync is reported in step 1
    assert all(gap is None or gap < 1e-9 for gap in gaps)
    assert all("verify" in phases for phases in observer.phases)


@pytest.mark.parametrize(
    "flags, verified, probed",
    [
        ({"probe_sync_every": 0}, [1.0] * 4, []),
        ({"verify_sync": False, "probe_sync_every": 2}, [0.5, 0.5, None, 0.5], [0, 1, 3]),
        ({"verify_sync": False, "probe_sync_every": 0}, [None] * 4, []),
    ],
)
def test_the_flags_say_what_is_compared(flags, verified, probed):
    observer, _ = run(**flags)
    assert [reports.get("sync/verified") for reports in observer.reports] == verified
    assert [i for i, reports in enumerate(observer.reports) if "sync/probe_gap" in reports] == probed
    assert [i for i, phases in enumerate(observer.phases) if "verify" in phases] == [
        i for i, item in enumerate(verified) if item is not None
    ]


def spoiled(load, version, self, named_weights, new):
    """Load weights with one changed number, from some version on."""
    named = {name: x.clone() for name, x in named_weights}
    if new >= version:
        named[WRONG].view(-1)[5] += 1e-12
    load(self, named.items(), new)


@pytest.mark.parametrize("version, steps", [(1, 0), (3, 2)])
def test_a_wrong_number_in_the_engine_stops_the_run_and_what_it_learned_is_saved(version, steps, monkeypatch):
    load = functools.partial(spoiled, NativeEngine.load, version)
    monkeypatch.setattr(NativeEngine, "load", lambda self, named_weights, new=0: load(self, named_weights, new))
    observer, outcome = run()
    assert outcome.error.startswith(
        f"after the sync of version {version} the engine does not hold the trainer's weights"
    )
    assert f"{WRONG} differs" in outcome.error
    assert [step for step, _ in observer.steps] == list(range(1, steps + 1))
    if steps:
        assert observer.error == outcome.error and observer.params is not None
    else:
        assert not hasattr(observer, "params")  # it has learned nothing to save
    assert run(verify_sync=False)[1].error is None, "a probe does not see it"


def test_no_result_is_read_before_the_engine_has_begun(monkeypatch):
    """Between a sync and the first iteration digests are begun and not read; they are read before rows are scored."""
    events = []

    def recorded(owner, name, event):
        original = getattr(owner, name)

        def call(*args, **options):
            events.append(event)
            return original(*args, **options)

        monkeypatch.setattr(owner, name, call)

    recorded(NativeEngine, "load", "sync")
    recorded(NativeEngine, "step", "iteration")
    recorded(SyncDigests, "compare", "read")
    recorded(phases, "score_batch", "score")
    _, outcome = run(probe_sync_every=0, max_new_tokens=40)
    assert outcome.error is None
    *syncs, last = events_by_sync(events)
    assert len(syncs) == 4
    for number, its in enumerate(syncs):
        begun = its.index("read")
        assert its[:begun] == ["iteration"] * begun and begun > 0
        assert begun <= READ_AFTER or number == 0  # the evaluation before the first step reads when it has ended
        assert its.count("read") == 1 and its.count("iteration") >= begun
        assert its[-1] == "score"
    assert last.count("read") == 1 and last[0] == "iteration"


def events_by_sync(events):
    """The events after each sync."""
    cuts = [i for i, event in enumerate(events) if event == "sync"] + [len(events)]
    return [events[a + 1 : b] for a, b in itertools.pairwise(cuts)]


@pytest.mark.gloo
def test_a_wrong_shard_on_one_rank_stops_all_before_its_rows_are_scored(monkeypatch):
    """The rank with the wrong number is named, and the ranks take unequal numbers of iterations."""
    load = NativeEngine.load
    job = small_job(GRPO, mesh="dp2", steps=2, batch_prompts=3, probe_sync_every=0)

    def program(mesh):
        spoil = functools.partial(spoiled, load, 2 if mesh.rank == 1 else 99)
        monkeypatch.setattr(NativeEngine, "load", lambda self, weights, new=0: spoil(self, weights, new))
        observer = Timed()
        outcome = loop.train_loop(job, mesh, observer)
        return outcome.error, [step for step, _ in observer.steps]

    error, steps = launch(program, job.sizes, "cpu")
    assert "after the sync of version 2 the engine does not hold" in error and steps == [1]
    assert f"{WRONG} differs" in error and "1" in error.split("differs")[1]


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, how",
    [
        ("sp2", {}),
        ("dp2,tp2", {"generate_mesh": "dp4", "dtype": "bfloat16", "fsdp": True, "optimizer": "muon"}),
    ],
)
def test_a_run_on_ranks_is_verified_at_every_step(mesh, how):
    job = small_job(GRPO, mesh=mesh, steps=2, minibatches=1, eval_prompts=2, probe_sync_every=1, **how)

    def program(mesh):
        observer = Timed()
        return loop.train_loop(job, mesh, observer).error, observer.reports

    error, reports = launch(program, job.sizes, "cpu")
    assert error is None and [report["sync/verified"] for report in reports] == [1.0] * 2
    bound = 0.05 if job.settings.models.dtype == "bfloat16" else 1e-9
    assert max(row["sync/probe_gap"] for row in reports) < bound
