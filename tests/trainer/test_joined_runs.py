"""Runs with generators of other jobs, which join, die, stop and go: the numbers of a run that has none of it."""

import asyncio
import dataclasses
import functools
import os
import re
import signal
import socket
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from joined_runs import FORK, KILLED, PLACE, generators, joined, joined_job, trained
from selection import quick
from small_runs import GRPO, MEASURED, PPO, Quiet, small_job
from test_episode_runs import Branching, episode_job
from test_greedy_ahead import filtered_remax
from test_refilled_runs import equal, reward, stale_dapo

from funrl import trees
from funrl.algos.recipes.rollout_is import rollout_is
from funrl.asynchrony.leases import LeaseRule
from funrl.environments.logged import LoggedEnvironment
from funrl.mesh.mesh import single
from funrl.mesh.text import MeshError
from funrl.processes.connections import Addresses, PeerError, write_addresses
from funrl.rewards.call import RewardError
from funrl.rollout.joined.generator import Counts, NotJoinedError
from funrl.rollout.joined.lease_server import PROGRAM_REQUESTS, LeaseServer
from funrl.trainer import phases
from funrl.trainer.ahead import rows as rows_ahead
from funrl.trainer.checkpoints.checkpoint import complete_checkpoints
from funrl.trainer.jobs import engines
from funrl.trainer.placement import joined as placement_joined
from funrl.trainer.placement.joined import join_run, own_host_name
from funrl.trainer.placement.logged import logged_source, read_groups
from funrl.trainer.placement.ranks import run_rank
from funrl.trainer.replay import replay
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.sources.heldout import HeldoutWriter

pytestmark = pytest.mark.gloo
OWN = ("memory/", "sync/bytes")  # metrics of the ranks
ONE = {"one": (None, None)}


@functools.cache
def alone(compose=GRPO, **settings):
    """The run whose ranks generate themselves."""
    job = small_job(compose, **settings)
    return trained(job, "/nonexistent")


def same(ended, other):
    """Samples, tables, metrics and weights of two runs, to the bit."""
    (outcome, observer, weights), (_, plain, own) = ended, other
    assert outcome.error is None
    assert observer.shown == plain.shown and observer.shown
    assert observer.table == plain.table and observer.table
    for (_, a), (_, b) in zip(observer.steps, plain.steps, strict=True):
        names = [n for n in a if not n.startswith(OWN) and not n.endswith(MEASURED)]
        assert a.keys() == b.keys() and {n: a[n] for n in names} == {n: b[n] for n in names}
    for a, b in zip(trees.leaves(weights), trees.leaves(own), strict=True):
        assert torch.equal(a, b)


class Ledger:
    """Requests as they are opened and as their completions arrive."""

    def __init__(self, monkeypatch):
        self.opened = []
        self.arrived = []
        open_units, collect = LeaseServer.open, LeaseServer.collect

        def opening(lease_server, units):
            units = list(units)
            self.opened += [(request.number, request.seed) for unit in units for request in unit]
            open_units(lease_server, units)

        def collecting(lease_server, *asked):
            news = collect(lease_server, *asked)
            self.arrived += [done.number for done in news.completions]
            return news

        monkeypatch.setattr(LeaseServer, "open", opening)
        monkeypatch.setattr(LeaseServer, "collect", collecting)

    def assert_once(self):
        """Each request that was opened has arrived once."""
        assert sorted(self.arrived) == sorted(number for number, _ in self.opened) and self.arrived


@pytest.mark.slow
def test_one_generator_that_joins_gives_the_bits_of_ranks_that_generate_themselves(tmp_path):
    ended, exits = joined(tmp_path, ONE)
    same(ended, alone())
    assert exits == {"one": 0}
    groups, loads, size = map(int, re.findall(r"^ended (\d+) (\d+) (\d+)", (tmp_path / "one.log").read_text(), re.M)[0])
    assert groups >= 26 and loads >= 4 and size == loads * sum(x.nbytes for x in trees.leaves(ended[2]))
    assert all(metrics["sync/verified"] == 1 for _, metrics in ended[1].steps)
    assert not (tmp_path / placement_joined.ADDRESSES).exists()


@pytest.mark.slow
def test_what_a_generator_that_is_killed_held_goes_to_one_that_joins(tmp_path, monkeypatch):
    ledger = Ledger(monkeypatch)
    wanted = {"first": ((signal.SIGKILL, 11), None), "second": (None, "first")}
    ended, exits = joined(tmp_path, wanted)
    same(ended, alone())
    ledger.assert_once()
    assert exits == {"first": KILLED, "second": 0}
    text = "\n".join(ended[1].notes)
    assert "is lost: " in text and "of its groups go to others" in text


@pytest.mark.slow
def test_a_generator_that_is_terminated_gives_its_groups_back(tmp_path, monkeypatch):
    ledger = Ledger(monkeypatch)
    wanted = {"first": ((signal.SIGTERM, 10), None), "second": (None, "first")}
    ended, exits = joined(tmp_path, wanted)
    same(ended, alone())
    ledger.assert_once()
    assert exits == {"first": 0, "second": 0} and "left" in (tmp_path / "first.log").read_text()
    assert any(re.search(r"has left(, and \d+ of its groups go to others)?; \d+ in service", x) for x in ended[1].notes)


@pytest.mark.slow
def test_a_stopped_generator_is_named_and_its_work_moved(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "LeaseRule", functools.partial(LeaseRule, 3.0))
    ledger = Ledger(monkeypatch)
    wanted = {"first": ((signal.SIGSTOP, 11), None), "second": (None, "first")}
    ended, exits = joined(tmp_path, wanted)
    same(ended, alone())
    ledger.assert_once()
    assert exits == {"first": KILLED, "second": 0}  # by the test: it was stopped to the end
    assert any("is lost: it has been silent for" in note for note in ended[1].notes)


RUNS = {
    "fsdp": (GRPO, {"mesh": "dp2", "fsdp": True, "steps": 2}, {"place": "train:dp2 generate:join", "fsdp": True}),
    "episodes": (
        PPO,
        {"probe_sync_every": 1, "task": "calculator", "reward": None, "episode_turns": 3, "steps": 2},
        {},
    ),
}


@pytest.mark.parametrize("name", quick(RUNS, []))
def test_every_kind_of_run_has_the_same_bits(name, tmp_path):
    compose, together, apart = RUNS[name]
    settings = together | {"mesh": "dp1", "generate_mesh": None} | apart
    ended, exits = joined(tmp_path, ONE, compose, **settings)
    same(ended, alone(compose, **together))
    assert exits == {"one": 0}


STALE = {"minibatches": 1, "steps": 4}
WAIT_S = 120.0  # for a step that does not come, as the evaluation waits for it


def learned_and_evaluated(monkeypatch):
    """A list of the steps that a run learns from and evaluates; an evaluation begins once the next step has learned."""
    events = []
    learn, write, evaluate = phases.learn_batch, HeldoutWriter.write, HeldoutWriter.evaluate

    def learning(*given):
        state, metrics = learn(*given)
        events.append(("learned", state.step))
        return state, metrics

    async def writing(writer, resident):
        limit = time.monotonic() + WAIT_S
        while writer._step < STALE["steps"] and ("learned", writer._step + 1) not in events:
            await asyncio.sleep(0.005)
            if time.monotonic() > limit:
                raise RewardError(f"step {writer._step + 1} waits for the evaluation after step {writer._step}")
        return await write(writer, resident)

    def evaluating(writer, *given):
        events.append(("evaluated", writer._step))
        return evaluate(writer, *given)

    monkeypatch.setattr(phases, "learn_batch", learning)
    monkeypatch.setattr(HeldoutWriter, "write", writing)
    monkeypatch.setattr(HeldoutWriter, "evaluate", evaluating)
    return events


def kills_who_takes_the_second_evaluation(monkeypatch, run_dir):
    """Kill the first generator that takes requests of a run's second evaluation, and let the one after it begin."""
    take = LeaseServer._take

    def taking(lease_server, name, room):
        work = take(lease_server, name, room)
        mark = run_dir / "first.signal"
        if not mark.exists() and any(requests[0].number // PROGRAM_REQUESTS == 2 for _, requests in work):
            os.kill(int(re.findall(r":(\d+)-", name)[0]), signal.SIGKILL)
            mark.touch()
        return work

    monkeypatch.setattr(LeaseServer, "_take", taking)


@pytest.mark.slow
def test_rows_ahead_and_evaluations_beside_them_are_the_same_whoever_writes_them(tmp_path, monkeypatch):
    ledger = Ledger(monkeypatch)
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    settings = STALE | {"staleness": 1, "eval_every": 2}
    with monkeypatch.context() as patch:
        kills_who_takes_the_second_evaluation(patch, folders[0])
        events = learned_and_evaluated(patch)
        wanted = {"first": (None, None), "second": (None, "first")}
        ended, exits = joined(folders[0], wanted, rollout_is, **settings)
    assert exits == {"first": KILLED, "second": 0}
    assert [step for kind, step in events if kind == "evaluated"] == [0, 2, 4]
    for step in (0, 2):
        assert events.index(("learned", step + 1)) < events.index(("evaluated", step))
    monkeypatch.setattr(rows_ahead, "evaluation_beside", lambda *_: None)  # steps wait for evaluations
    # After the first evaluation, step 1 and the rows ahead of step 2, of 4 iterations each; there are at least 28.
    wanted = {"first": ((signal.SIGKILL, 13), None), "second": (None, "first")}
    again, exits = joined(folders[1], wanted, rollout_is, **settings)
    assert exits == {"first": KILLED, "second": 0}
    ended[1].shown.sort(key=lambda shown: shown[0])  # those of an evaluation come when it has ended
    for _, metrics in (*ended[1].steps, *again[1].steps):
        assert metrics.pop("sync/verified", 1.0) == 1.0  # after an evaluation that is waited for, in its own step
    same(again, ended)
    assert [step for step, metrics in ended[1].steps if "eval/reward" in metrics] == [1, 2, 4]
    ledger.assert_once()
    steps = [metrics for _, metrics in ended[1].steps]
    assert [metrics["rollout/stale_gap_max"] > 0 for metrics in steps] == [False, True, True, True]
    assert all(metrics["rollout/logprob_gap_max"] < 1e-12 for metrics in steps)
    assert ended[1].shown[0] == alone(rollout_is, **STALE)[1].shown[0]


class Alike(Branching):
    """`Branching`, whose episodes have the same reward after two prompts out of five."""

    async def run(self, policy, example, seed):
        episode = await super().run(policy, example, seed)
        return dataclasses.replace(episode, rewards={"policy": 0.5}) if equal(example.text) else episode


@pytest.mark.slow
def test_episodes_ahead_that_a_killed_generator_began_are_repeated_with_the_same_bits(tmp_path, monkeypatch):
    ledger = Ledger(monkeypatch)
    settings = STALE | {"staleness": 2, "eval_every": 9, "place": PLACE, "save_rollouts": 1, "run_dir": str(tmp_path)}
    wanted = {"first": ((signal.SIGKILL, 40), None), "second": (None, "first")}
    (_, observer, _), exits = joined_job(tmp_path, wanted, episode_job(stale_dapo, Alike(), **settings))
    assert exits == {"first": KILLED, "second": 0}
    ledger.assert_once()
    steps = [metrics for _, metrics in observer.steps]
    assert [metrics["rollout/stale_gap_max"] > 0 for metrics in steps] == [False, True, True, True]
    assert all(metrics["rollout/logprob_gap_max"] < 1e-12 for metrics in steps)
    log = read_groups(tmp_path)
    assert log is not None
    assert max(map(len, log.by_step.values())) > 4, "no prompt has been dropped"
    together = episode_job(stale_dapo, LoggedEnvironment(Branching.agents), **STALE, eval_every=9)
    source = functools.partial(logged_source, log._replace(joined=True))
    done = replay(together, tmp_path, None, single(), Quiet(), source)
    assert [(step.step, str(part)) for step in done for part in step.differences if not part.agrees(0.0)] == []
    turns = [part.total for step in done for part in step.differences if part.kind == "turns"]
    assert len(turns) == 4 and min(turns) >= 24


@pytest.mark.slow
def test_episodes_ahead_of_several_ranks_have_the_bits_of_those_of_one(tmp_path):
    runs = []
    for name, place in {"one": PLACE, "two": "train:dp2 generate:join"}.items():
        folder = tmp_path / name
        folder.mkdir()
        job = episode_job(
            rollout_is, Branching(), staleness=2, place=place, run_dir=str(folder), **STALE | {"steps": 3}
        )
        runs.append(joined_job(folder, ONE, job)[0])
    ended, again = runs
    assert ended[1].shown == again[1].shown
    for (_, a), (_, b) in zip(ended[1].steps, again[1].steps, strict=True):
        assert a["actor/grad_norm"] == pytest.approx(b["actor/grad_norm"], rel=1e-9)


@pytest.mark.slow
def test_rows_ahead_of_a_filter_and_beside_greedy_ones_are_those_of_any_generators(tmp_path):
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    settings = STALE | {"staleness": 2, "reward": reward}
    ended, _ = joined(folders[0], ONE, filtered_remax, **settings)
    wanted = {"first": ((signal.SIGKILL, 13), None), "second": (None, "first")}
    same(joined(folders[1], wanted, filtered_remax, **settings)[0], ended)
    steps = [metrics for _, metrics in ended[1].steps]
    assert {step["filter_groups/kept_share"] * step["filter_groups/sampled_prompts"] for step in steps} == {4}
    assert any(metrics["filter_groups/dropped_prompts"] for metrics in steps)
    assert [metrics["rollout/stale_gap_max"] > 0 for metrics in steps] == [False, True, True, True]


@pytest.mark.slow
def test_a_generator_goes_on_with_a_run_that_was_killed_and_is_started_again(tmp_path):
    settings = {"steps": 5, "save_every": "1", "place": PLACE, "run_dir": str(tmp_path)}
    job = small_job(GRPO, **settings)
    with generators(job, tmp_path, ONE) as started:
        first = FORK.Process(target=trained, args=(job, tmp_path))
        first.start()
        deadline = time.monotonic() + 120
        while len(complete_checkpoints(str(tmp_path / "checkpoints"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        first.kill()
        first.join()
        steps = max(complete_checkpoints(str(tmp_path / "checkpoints")))
        ended = trained(small_job(GRPO, **settings, resume=True), tmp_path)
    _, _, weights = ended
    _, plain, own = alone(steps=5)
    for (_, a), (_, b) in zip(ended[1].steps, plain.steps[steps:], strict=True):
        assert a["actor/grad_norm"] == b["actor/grad_norm"]
    for a, b in zip(trees.leaves(weights), trees.leaves(own), strict=True):
        assert torch.equal(a, b)
    assert started["one"].exitcode == 0
    assert "the run does not answer any more" in (tmp_path / "one.log").read_text()


@pytest.mark.parametrize(
    "settings,problem",
    [
        ({"engine": "hf"}, "--engine=hf with --place=generate:join"),
        ({"staleness": 1, "window": 2}, "--window=2 does nothing with --place=generate:join"),
        ({"new_tokens_per_step": 2}, "--new_tokens_per_step=2 with --place=generate:join"),
        ({"generate_mesh": "dp1"}, "--generate_mesh=dp1 does nothing"),
        ({"place": "train:dp2@0,2 generate:join"}, "generators that join are no ranks of this run"),
        ({"place": "train:dp2 generate:join generate:2"}, "the pool 'generate' is given twice"),
        ({"place": "train:1 generate:join", "mesh": "dp2"}, "--mesh=dp2 does nothing"),
    ],
)
def test_flags_that_do_not_go_with_it_are_refused(settings, problem):
    with pytest.raises((SettingsError, MeshError)) as error:
        small_job(GRPO, **{"place": "generate:join", **settings})
    assert problem in str(error.value)


def test_a_generator_that_is_lost_joins_the_same_run_again(tmp_path, monkeypatch):
    errors = [NotJoinedError("refused"), PeerError("its connection has ended"), NotJoinedError("refused"), None]
    served = []

    def serve(engine, addresses, *_):
        served.append(addresses.secret)
        error = errors[len(served) - 1]
        if error is not None:
            raise error
        return "ended", Counts()

    monkeypatch.setattr(placement_joined, "serve_run", serve)
    monkeypatch.setattr(placement_joined, "build", lambda *_: SimpleNamespace(generator=SimpleNamespace(whole=None)))
    monkeypatch.setattr(placement_joined, "ADDRESS_LOOK_S", 0.0)
    write_addresses(tmp_path / placement_joined.ADDRESSES, Addresses([("node", 1)], "ab"))
    job = SimpleNamespace(settings=SimpleNamespace(waiting=SimpleNamespace(timeout=1.0)))
    notes = []
    assert join_run(cast(Any, job), str(tmp_path), single(), notes.append, 600.0) == ("ended", Counts())
    assert served == ["ab"] * 4
    assert [note.partition("(")[2].partition(")")[0] for note in notes] == ["refused", "its connection has ended"]
    errors[4:] = [NotJoinedError("refused")]
    with pytest.raises(PeerError, match=r"no run that generators can join for -1 s; .*; refused"):
        join_run(cast(Any, job), str(tmp_path), single(), notes.append, -1.0)


def test_a_rank_is_called_by_the_name_that_others_look_up(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    monkeypatch.setattr(socket, "getfqdn", lambda: "first-0.first.cluster.local")
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    assert own_host_name() == "first-0.first.cluster.local"
    monkeypatch.setattr(socket, "getfqdn", lambda: "localhost.localdomain")
    monkeypatch.setattr(socket, "gethostname", lambda: "node")
    assert own_host_name() == "node"
    monkeypatch.setenv("FUNRL_HOST", "10.0.0.7")
    assert own_host_name() == "10.0.0.7"


def test_a_run_without_a_directory_cannot_be_joined():
    job = small_job(GRPO, place="generate:join")
    with pytest.raises(SettingsError, match="needs --run_dir"):
        run_rank(job, single(), Quiet())
