"""Evaluations of a run that generates ahead: beside the next step, with the numbers of an evaluation by itself."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import time
from unittest import mock

import pytest
from selection import quick
from small_runs import MEASURED, Quiet, begin, small_job
from test_placement_runs import check_ages, one_thread

from funrl import trees
from funrl.algos.recipes.rollout_is import rollout_is
from funrl.environments.logged import LoggedEnvironment
from funrl.mesh.launch import WorkerError, launch
from funrl.mesh.mesh import single
from funrl.mesh.pools.channel import run_store
from funrl.rewards.call import RewardError
from funrl.track.observe import RunObserver
from funrl.trainer import phases
from funrl.trainer.checkpoints.checkpoint import complete_checkpoints, recorded
from funrl.trainer.evaluator import Evaluator
from funrl.trainer.placement import generate
from funrl.trainer.placement.groups import GroupGenerators
from funrl.trainer.placement.logged import logged_source, read_groups
from funrl.trainer.placement.ranks import run_rank
from funrl.trainer.replay import replay
from funrl.trainer.steps.sync import sync

pytestmark = pytest.mark.gloo
SETTINGS = {"minibatches": 1, "steps": 4, "staleness": 2, "eval_every": 2, "max_new_tokens": 12}
EVALUATED = [0, 2, 4]
LIMIT_S = 300.0  # for a step that does not come, as the evaluation waits for it


class Events:
    """What a rank that trains does, in its order, and the weights that it had evaluated."""

    def __init__(self):
        self.names = []
        self.weights = {}

    def learned(self, learn, trainer, state, rows):
        after, metrics = learn(trainer, state, rows)
        self.names.append(("learned", after.step))
        run_store().set(f"test/learned/{after.step}", "1")
        return after, metrics

    def begun(self, begin_evaluation, evaluator, state, **first):
        self.weights[state.step] = trees.map(lambda x: x.clone(), state.roles["policy"].params)
        return begin_evaluation(evaluator, state, **first)

    def evaluated(self, evaluate, generators, step, numbers):
        metrics = evaluate(generators, step, numbers)
        self.names.append(("evaluated", step))
        return metrics


async def after_the_next_step(write, delayed, generation, resident, work):
    """Write a group of an evaluation after some steps once the step that follows has been learned."""
    limit = time.monotonic() + LIMIT_S
    step = work.weights - 1  # the first weights are version 1
    while work.heldout and step in delayed and not run_store().check([f"test/learned/{step + 1}"]):
        await asyncio.sleep(0.005)
        if time.monotonic() > limit:
            raise RewardError(f"step {step + 1} waits for the evaluation of step {step}")
    return await write(generation, resident, work)


def watched(job, folder, delayed, mesh):
    """A run of this rank whose evaluations after some steps end after the next step's update."""
    observer = Quiet(str(folder / "checkpoints"))
    events = Events()
    write, evaluate, start = generate.write_work, GroupGenerators._evaluated, Evaluator._begin
    learn = functools.partial(events.learned, phases.learn_batch)
    with contextlib.ExitStack() as stack, one_thread():
        for owner, name, function in (
            (phases, "learn_batch", learn),
            (Evaluator, "_begin", lambda *args, **first: events.begun(start, *args, **first)),
            (GroupGenerators, "_evaluated", lambda *args: events.evaluated(evaluate, *args)),
            (generate, "write_work", lambda *args: after_the_next_step(write, delayed, *args)),
        ):
            stack.enter_context(mock.patch.object(owner, name, function))
        outcome = run_rank(job, mesh, observer)
    observer.params = None
    return outcome, observer, events


def evaluated_alone(job, weights):
    """Metrics and table of evaluations of some weights, by a process that does nothing else meanwhile."""
    show = Quiet()
    metrics = {}
    with one_thread():
        run, state = begin(job, single(), show)
        for step, params in weights.items():
            roles = dict(state.roles) | {"policy": state.roles["policy"]._replace(params=params)}
            state = sync(run.parts, state._replace(roles=roles, step=step), frozen=run.frozen)
            metrics[step] = run.source.evaluate(state.roles, step)
    return metrics, show.table


def evaluation_of(metrics):
    return {n: x for n, x in metrics.items() if n.startswith("eval/") and not n.endswith(MEASURED)}


def repeated(folder, job, mesh):
    """A run that is written and trained again, from its log."""
    if job.task.environment is not None:
        job = dataclasses.replace(job, task=job.task._replace(environment=LoggedEnvironment(("policy",))))
    log = read_groups(folder)
    assert log is not None
    return replay(job, folder, None, mesh, Quiet(), functools.partial(logged_source, log))


CALCULATOR = {"task": "calculator", "reward": None, "episode_turns": 3}
RUNS = {
    "two replicas": ({"place": "train:dp1 generate:dp2"}, {}),
    "episodes, tp2": ({"place": "train:dp1 generate:tp2"}, CALCULATOR | {"max_new_tokens": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(RUNS, ["two replicas"]))
def test_the_next_step_does_not_wait_and_the_numbers_are_those_of_an_evaluation_alone(name, tmp_path):
    place, settings = RUNS[name]
    job = small_job(rollout_is, save_rollouts=1, **SETTINGS | place | settings)
    delayed = [0, 2]
    outcome, observer, events = launch(functools.partial(watched, job, tmp_path, delayed), job.launched, "cpu")
    assert outcome.error is None
    order = events.names
    assert [step for kind, step in order if kind == "evaluated"] == EVALUATED
    for step in delayed:
        assert order.index(("learned", step + 1)) < order.index(("evaluated", step))
    together = {n: x for n, x in (SETTINGS | settings).items() if n != "staleness"}
    alone, table = evaluated_alone(small_job(rollout_is, **together), events.weights)
    assert observer.table == table and [row.step for row in table[:: len(table) // 3]] == EVALUATED
    steps = dict(observer.steps)
    assert list(steps) == [1, 2, 3, 4]  # in their order
    assert evaluation_of(steps[1]) == evaluation_of(outcome.first) == evaluation_of(alone[0])
    assert evaluation_of(steps[2]) == evaluation_of(alone[2]) != {} and evaluation_of(steps[3]) == {}
    assert evaluation_of(steps[4]) == evaluation_of(outcome.last) == evaluation_of(alone[4])
    check_ages(list(steps.values()), 2)
    again = repeated(tmp_path, small_job(rollout_is, **together), single())
    assert [str(part) for step_again in again for part in step_again.differences if not part.agrees(0.0)] == []


def observed(job, run_dir, patches, mesh):
    """A run of this rank with a directory; `patches` are of functions of both sides."""
    with contextlib.ExitStack() as stack, one_thread():
        for owner, name, function in patches:
            stack.enter_context(mock.patch.object(owner, name, function))
        observer = stack.enter_context(RunObserver(job, str(run_dir), mesh.rank))
        return run_rank(job, mesh, observer)


def lines_of(run_dir, name="metrics.jsonl"):
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def evaluated_steps(run_dir):
    """Steps whose lines have an evaluation, and those of the table with the rows of each."""
    counts = {}
    for row in lines_of(run_dir, "eval_samples.jsonl"):
        counts[row["step"]] = counts.get(row["step"], 0) + 1
    return [line["step"] for line in lines_of(run_dir) if "eval/examples" in line], counts


@pytest.mark.slow
def test_a_checkpoint_has_the_evaluation_of_its_step_and_is_resumed_from(tmp_path):
    place = {"place": "train:dp1 generate:dp1", "run_dir": str(tmp_path), "save_every": "1", "keep_checkpoints": 9}
    job = small_job(rollout_is, **SETTINGS | {"steps": 2}, **place)
    launch(functools.partial(observed, job, tmp_path, ()), job.launched, "cpu")
    checkpoints = complete_checkpoints(str(tmp_path / "checkpoints"))
    facts = {step: recorded(path).facts for step, path in checkpoints.items()}
    line = lines_of(tmp_path)[1]
    assert all(facts[2]["last"][name] == line[name] for name in facts[2]["last"]) and facts[2]["last"]
    assert facts[2]["score"] == line["eval/reward"] and facts[2]["unfinished"] is None
    assert facts[1]["last"] == {} and facts[1]["first"] == facts[2]["first"] != {}
    job = small_job(rollout_is, **SETTINGS, **place, resume=True)
    outcome = launch(functools.partial(observed, job, tmp_path, ()), job.launched, "cpu")
    assert outcome.error is None and outcome.first == facts[2]["first"]
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4]
    assert lines_of(tmp_path)[1] == line
    assert evaluated_steps(tmp_path) == ([1, 2, 4], {0: 6, 2: 6, 4: 6})


async def dies_after(key, step, write, generation, resident, work):
    """End the process of a rank that generates when it is to evaluate after a step that has been committed."""
    evaluates = work.heldout and work.weights == step + 1
    while evaluates and not run_store().check([key]):
        await asyncio.sleep(0.005)
    if evaluates:
        os._exit(1)
    return await write(generation, resident, work)


def waits_before(step, key, draw, trainer, state):
    """Draw a batch; before the batch after `step`, say so and wait for the end of the process."""
    if state.step == step:
        run_store().set(key, "1")
        time.sleep(LIMIT_S)
    return draw(trainer, state)


@pytest.mark.slow
def test_an_evaluation_that_a_generator_did_not_survive_is_made_when_the_run_is_resumed(tmp_path):
    settings = SETTINGS | {"place": "train:dp1 generate:dp1", "run_dir": str(tmp_path)}
    write, draw = generate.write_work, phases.draw_batch
    patches = (
        (generate, "write_work", lambda *args: dies_after("test/waits", 2, write, *args)),
        (phases, "draw_batch", functools.partial(waits_before, 2, "test/waits", draw)),
    )
    job = small_job(rollout_is, **settings)
    with pytest.raises(WorkerError, match="rank 1"):
        launch(functools.partial(observed, job, tmp_path, patches), job.launched, "cpu")
    assert [line["step"] for line in lines_of(tmp_path)] == [1]
    (path,) = complete_checkpoints(str(tmp_path / "checkpoints")).values()
    facts = recorded(path).facts
    assert facts["step"] == 2 and facts["last"] == {} and facts["unfinished"]["actor/grad_norm"] > 0
    job = small_job(rollout_is, **settings, resume=True)
    outcome = launch(functools.partial(observed, job, tmp_path, ()), job.launched, "cpu")
    assert outcome.error is None
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[1].items() >= facts["unfinished"].items()
    assert evaluated_steps(tmp_path) == ([1, 2, 4], {0: 6, 2: 6, 4: 6})


def fails_on(prompts, prompt, completion, **fields):
    if prompt in prompts:
        raise ValueError(f"no score for {prompt}")
    return 0.5


@pytest.mark.slow
def test_a_reward_that_fails_in_an_evaluation_ends_the_run(tmp_path):
    settings = SETTINGS | {"steps": 2, "place": "train:dp1 generate:dp1", "reward_workers": 0}
    prompts = [example.text for example in small_job(rollout_is, **settings).task.heldout]
    job = small_job(rollout_is, reward=functools.partial(fails_on, prompts), **settings)
    outcome = launch(functools.partial(observed, job, tmp_path, ()), job.launched, "cpu")
    assert "no score for" in outcome.error and outcome.first == {}
