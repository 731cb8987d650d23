"""Moves of rows and their packing in a dry run, against what ranks really send and against closed forms."""

import dataclasses
import functools

import numpy as np
import pytest
from dry_jobs import CPU, H100, small

from funrl.algos.recipes import recipe
from funrl.cost import dry_run
from funrl.cost.report import communication, seconds_table, traffic
from funrl.cost.tracing.estimate import MOVE, MOVES, pretended
from funrl.data.packing import UNIT
from funrl.mesh import rows as mesh_rows
from funrl.mesh.collectives import gather_objects
from funrl.mesh.launch import launch
from funrl.trainer import phases, startup
from funrl.trainer.jobs.build import build
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.settings.settings import settings_of, with_flags
from funrl.trainer.steps.micro import row_cost
from funrl.trainer.steps.sync import sync


class Silent:
    """An observer of nothing of interest."""

    def checkpoint_folder(self):
        return None

    def note(self, text):
        pass

    def samples(self, *shown):
        pass


def real_job(name, tokens, **given):
    """A job of the embedded task whose rows all have the same length."""
    chosen = {
        "batch_prompts": 12,
        "warmstart_steps": 0,
        "eval_prompts": 2,
        "compile": "off",
        "device": "cpu",
        "token_budget": 64,
    }
    job = prepare(settings_of(**chosen | given), recipe(name))
    if isinstance(job, RLJob):
        prompts = [p for p in job.task.prompts if len(p.tokens) == tokens]
        return dataclasses.replace(job, task=job.task._replace(prompts=prompts))
    examples = [example for example in job.task.examples if {len(text.tokens) for text in example.texts} == {tokens}]
    return dataclasses.replace(job, task=job.task._replace(examples=examples))


def sends(job, mesh):
    """Bytes and messages to other ranks in each exchange of a step, of every rank."""
    results, exchange = [], mesh_rows.ragged_all_to_all

    def watched(flat, send, receive, mesh, axes):
        others = [n for peer, n in enumerate(send) if peer != mesh.index(axes)]
        come = [n for peer, n in enumerate(receive) if peer != mesh.index(axes)]
        results.append((sum(others) * flat.shape[1], sum(come) * flat.shape[1], np.count_nonzero(others)))
        return exchange(flat, send, receive, mesh, axes)

    mesh_rows.ragged_all_to_all = watched  # in a process that ends with this
    run, state = startup.begin_run(job, mesh, Silent())
    state = sync(run.parts, state)
    rows, state, _ = phases.draw_batch(run, state)
    assert len(set(rows.lengths.tolist())) == 1
    drawn = len(results)
    rows, state, _ = phases.score_batch(run, state, rows)
    phases.learn_batch(run, state, rows)
    return gather_objects((results[:drawn], results[drawn:]), mesh)


RUNS = [
    ("ppo", 6, {"mesh": "dp2", "epochs": 2, "minibatches": 2, "max_new_tokens": 1}),
    ("grpo", 6, {"mesh": "dp2,tp2", "generate_mesh": "dp4", "samples_per_prompt": 3, "max_new_tokens": 1}),
    ("otb", 6, {"mesh": "dp2", "samples_per_prompt": 4, "max_new_tokens": 1}),  # whole groups are scored together
    ("dpo", 9, {"mesh": "dp2"}),
    ("grpo", 11, {"mesh": "sp2", "task": "shapes", "samples_per_prompt": 2, "max_new_tokens": 1}),
]


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "tokens", "given"), RUNS, ids=[given.get("task", "") + name for name, _, given in RUNS]
)
def test_the_bytes_that_are_counted_are_those_that_are_sent(name, tokens, given):
    job = real_job(name, tokens, **given)
    job = dataclasses.replace(job, settings=with_flags(job.settings, queue="fixed"))
    metrics = launch(functools.partial(sends, job), job.sizes, "cpu")
    phases = dry_run.estimate(job, tokens, CPU).phases
    for at, phase in enumerate(MOVES):
        by_move = list(zip(*(rank[at] for rank in metrics), strict=True))
        nbytes = [max(max(sent, come) for sent, come, _ in ranks) for ranks in by_move]
        messages = [max(count for *_, count in ranks) for ranks in by_move]
        counted = [t for (op, _), t in phases[phase].traffic.items() if op == MOVE] if phase in phases else []
        assert sum(t.nbytes for t in counted) == sum(nbytes) and sum(t.count for t in counted) == sum(messages), phase
    assert any(op == MOVE for op, _ in phases[MOVES[0]].traffic)
    assert (MOVES[1] in phases) == (name in ("ppo", "otb"))


@pytest.mark.slow
def test_shares_of_useful_work_have_their_closed_forms():
    """Five rows of 33 tokens on four ranks: alone in 40 tokens each when they learn, and two micro-batches deep."""
    job = small("ppo", mesh="dp4", batch_prompts=5, samples_per_prompt=1, max_new_tokens=25, token_budget=32)
    estimate = dry_run.estimate(job, 8, CPU)
    with pretended(job.sizes) as mesh:
        role = build(job, mesh, lambda _: None).roles["policy"]
    cost = row_cost(role.placed)
    row = int(cost.work(np.array(33)))
    assert estimate.useful["update_policy"] == pytest.approx(5 * row / (4 * 2 * (row + 7 * UNIT)))
    # With 128 tokens of scoring one rank has two rows, in 72, and the others wait for it.
    assert estimate.useful["score_policy"] == pytest.approx(5 * row / (4 * (2 * row + 6 * UNIT)))
    assert set(estimate.useful) == {name for name in estimate.phases if name.startswith(("score_", "update_"))}
    line = seconds_table(estimate, CPU)
    assert f"{100 * estimate.useful['update_policy']:.1f}%" in line and "useful" in line.splitlines()[0]


@pytest.mark.slow
def test_a_move_takes_its_bytes_and_its_messages_and_memory_for_both_sides():
    job = small("grpo", mesh="dp4", batch_prompts=64, epochs=2, verify_sync=False)
    estimate = dry_run.estimate(job, 8, CPU)
    moves = estimate.phases[MOVES[0]]
    ((_, result),) = [item for item in moves.traffic.items() if item[0][0] == MOVE]
    row = 32 * (4 + 1 + 4)  # tokens of 4 bytes, a mask, log-probabilities in float32
    assert result.count == 3 and result.nbytes <= 32 * row and result.nbytes % row == 0
    table = next(t for (op, _), t in moves.traffic.items() if op == "all_reduce")
    assert table.nbytes == 128 * 8 * 3  # of each row its length, its end and its reward
    latency, speed = CPU.latency, CPU.link * CPU.efficiency.message
    seconds = 4 * latency + result.nbytes / speed + 2 * 3 / 4 * table.nbytes / speed
    assert communication(estimate, moves, CPU) == pytest.approx(seconds)
    assert moves.peak["batch"] > 4 * 32 * row  # rows before and after, a copy of what is sent and one of what comes
    assert "move_rows" in traffic(estimate) and "rows" not in estimate.left_out
    proven = dry_run.estimate(small("grpo", mesh="dp4", batch_prompts=64, epochs=2), 8, CPU).phases[MOVES[0]]
    (with_digests,) = [x for (op, _), x in proven.traffic.items() if op == MOVE]  # of three numbers a row
    assert with_digests.count == 6 and with_digests.nbytes == result.nbytes + result.nbytes / row * 24


@pytest.mark.slow
def test_far_ranks_move_rows_over_the_network():
    near, far = (
        dry_run.estimate(small("grpo", mesh=mesh, batch_prompts=64, epochs=1), 8, H100) for mesh in ("dp8", "dp16")
    )
    seconds = []
    for estimate, speed in ((near, H100.link), (far, H100.network)):
        costs = estimate.phases[MOVES[0]]
        only = {key: t for key, t in costs.traffic.items() if key[0] == MOVE}
        (first,) = only.values()
        seconds.append(communication(estimate, dataclasses.replace(costs, traffic=only), H100))
        assert seconds[-1] == pytest.approx(
            first.count * H100.latency + first.nbytes / (speed * H100.efficiency.message)
        )


@pytest.mark.slow
def test_one_rank_moves_nothing():
    estimate = dry_run.estimate(small("ppo", epochs=2), 8, CPU)
    assert not set(MOVES) & set(estimate.phases)
