"""The simulation of asynchronous runs: against loops over iterations, against schedules worked out by hand."""

import math
import os

import numpy as np
import pytest

from funrl.cost.schedules import (
    AsyncRun,
    EngineTimes,
    LengthError,
    LengthLaw,
    LoggedLengths,
    SimulatedGenerators,
    UpdateTimes,
    cut_remarks,
    engine_times,
    law_of_mean,
    lengths_of,
    logged_lengths,
    parse_lengths,
    rows_together,
    simulate_run,
)
from funrl.cost.tracing.hardware import HARDWARE
from funrl.models import decoder_config, decoder_model
from funrl.models.decoder.experts import Experts
from funrl.rollout.ledger import LedgerRule
from funrl.trainer.settings.settings import settings_of

TIMES = EngineTimes(fixed=1e-3, weights=4e-3, experts=2e-3, idle=0.75, row=5e-4, token=1e-6, read=1e-5, capacity=1e5)
PROMPT = 50


def by_iterations(times, replicas, slots, groups):
    """Seconds at which groups are complete, by a loop over the iterations of each replica."""
    clocks = [0.0] * replicas
    running = [[] for _ in range(replicas)]  # rows as [group, tokens left, tokens that it attends to]
    waiting = list(enumerate(groups))
    left = {group: len(lengths) for group, lengths in enumerate(groups)}
    ends = {}
    while left:
        for replica in range(replicas):  # all groups are there from the beginning: the one with the fewest rows is next
            while waiting:
                fewest = min(range(replicas), key=lambda i: (len(running[i]), i))
                if fewest != replica or len(running[replica]) + len(waiting[0][1]) > slots:
                    break
                group, lengths = waiting.pop(0)
                running[replica] += [[group, length, PROMPT] for length in lengths]
                clocks[replica] += times.read * PROMPT
        replica = min((i for i in range(replicas) if running[i]), key=lambda i: clocks[i])
        rows = running[replica]
        streamed = times.weights + times.experts * (1 - times.idle ** len(rows))
        context = sum(row[2] for row in rows)
        clocks[replica] += times.fixed + max(streamed, times.row * len(rows)) + times.token * context
        for row in rows:
            row[1] -= 1
            row[2] += 1
        for row in [row for row in rows if row[1] == 0]:
            rows.remove(row)
            left[row[0]] -= 1
            if not left[row[0]]:
                del left[row[0]]
                ends[row[0]] = clocks[replica]
    return ends


@pytest.mark.parametrize("replicas,slots", [(1, 4), (2, 8), (3, 64)])
def test_generators_take_the_time_of_their_iterations(replicas, slots):
    random = np.random.default_rng(0)
    groups = [random.integers(20, 300, 4).astype(float) for _ in range(12)]
    expected = by_iterations(TIMES, replicas, slots, groups)
    generators = SimulatedGenerators(TIMES, replicas, slots, PROMPT)
    for group, lengths in enumerate(groups):
        generators.submit(group, lengths)
    now = 0.0
    ends = {}
    while len(ends) < len(groups):
        generators.fill()
        seconds = generators.next_end()
        complete = generators.advance(seconds)
        now += seconds
        ends |= dict.fromkeys(complete, now)
    assert max(ends.values()) == pytest.approx(max(expected.values()), rel=0.02)
    for group, end in expected.items():
        assert ends[group] == pytest.approx(end, rel=0.1), group
    assert generators.rows_G.tolist() == [0] * replicas and not generators.left
    assert generators.offset_G == pytest.approx(np.zeros(replicas))
    assert now * replicas >= generators.busy > 0


def test_new_weights_cost_the_time_of_the_caches():
    generators = SimulatedGenerators(TIMES, replicas=1, slots=8, prompt=PROMPT)
    generators.submit(0, np.full(4, 100.0))
    generators.fill()
    assert generators.debt_G.tolist() == [TIMES.read * PROMPT]
    generators.advance(0.2)
    before = generators.next_end()
    context = 4 * (PROMPT + generators.iterations_G[0])
    generators.read_again()
    assert generators.next_end() - before == pytest.approx(TIMES.read * context)


def test_engine_times_are_bytes_and_flops_over_rates():
    config = decoder_config(
        vocab=1000, embed=64, layers=2, heads=4, kv_heads=2, head=16, mlp=128, max_positions=128, eos=(1,), pad=0
    )
    model = decoder_model(config)
    hardware = HARDWARE["h100"]
    times = engine_times(model, hardware)
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64  # q and o, k and v, the mlp, norms
    numbers = 2 * layer + 64 + 64 * 1000  # the last norm, and the unembedding
    speed = hardware.bandwidth * 0.7
    assert times.weights == pytest.approx(2 * numbers / speed)
    assert times.row == times.read == pytest.approx(2 * numbers / (hardware.half * 0.5), rel=1e-3)
    assert times.token == pytest.approx(2 * (2 * 2 * 2 * 16) / speed)  # keys and values of two heads in two layers
    assert times.capacity == pytest.approx((hardware.memory * 0.92 - 2 * (numbers + 64 * 1000)) / 256)
    half = engine_times(model, hardware, tensor=2)
    assert half.weights == pytest.approx(times.weights / 2) and half.token == pytest.approx(times.token / 2)
    assert half.fixed - times.fixed == pytest.approx(4 * hardware.latency)  # two sums in each of two layers


def test_ranks_that_split_experts_have_rows_of_their_own():
    sizes = {"vocab": 1000, "embed": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head": 16, "mlp": 128}
    experts = Experts(count=8, per_token=2, mlp=32)
    model = decoder_model(decoder_config(**sizes, experts=experts, max_positions=128, eos=(1,), pad=0))
    hardware = HARDWARE["h100"]
    one, four = (engine_times(model, hardware, expert=n) for n in (1, 4))
    assert one.experts and four.experts == pytest.approx(one.experts / 4) and four.weights == one.weights
    assert four.token == pytest.approx(one.token / 4) and four.capacity > 4 * one.capacity
    assert four.fixed - one.fixed == pytest.approx(4 * hardware.latency)  # a gather and a sum in each of two layers
    sent = 2 * 2 * 64 * 2 * 0.75 / (hardware.link * 0.7)
    assert four.row - one.row / 4 == pytest.approx(sent)


def test_only_the_experts_of_the_rows_are_read():
    assert TIMES.without_context(np.array([1, 2, 3])) == pytest.approx(
        [1e-3 + 4e-3 + 2e-3 * (1 - 0.75**b) for b in (1, 2, 3)]
    )
    assert TIMES.without_context(np.array(100)) == pytest.approx(1e-3 + 5e-4 * 100)  # bound by arithmetic


def test_slots_are_limited_by_the_cache():
    assert rows_together(TIMES, most=256, tokens=1000) == 100
    assert rows_together(TIMES, most=16, tokens=1000) == 16
    assert rows_together(TIMES, most=16, tokens=1e9) == 1
    assert rows_together(TIMES, most=512, tokens=30_000, groups=2) == 2  # three rows' tokens, in two caches


@pytest.mark.parametrize(
    "text,mean,most,spread",
    [
        ("mean:2000,max:16384", 2000, 16384, 0.8),
        ("max:400,mean:300,spread:0.5", 300, 400, 0.5),
    ],
)
def test_a_law_has_the_mean_that_is_asked_for(text, mean, most, spread):
    law = parse_lengths(text)
    assert law.mean == pytest.approx(mean) and (law.most, law.spread) == (most, spread)
    drawn = law.draw(np.random.default_rng(0), 4000, 16)
    assert drawn.mean() == pytest.approx(mean, rel=0.02) and drawn.max() == most
    within = np.log(drawn).var(axis=1).mean()
    assert within < np.log(drawn).var()  # completions of a prompt have something in common


@pytest.mark.parametrize("text", ["2000", "mean:2000", "mean:2000,max:x", "mean:9,max:8,least:1", "mean:900,max:800"])
def test_another_text_is_no_law(text):
    with pytest.raises(LengthError):
        parse_lengths(text)


@pytest.mark.parametrize("lines", ["3\n7\n40\n3\n", '{"tokens": 3}\n{"completion_tokens": 7}\n40\n3\n'])
def test_lengths_of_a_log_are_drawn_as_often_as_they_are_there(tmp_path, lines):
    log = tmp_path / "lengths"
    log.write_text(lines)
    lengths = logged_lengths(log, most=32)
    assert lengths == LoggedLengths((3, 3, 7, 32), cut=1) and (lengths.mean, lengths.most) == (11.25, 32)
    drawn = lengths.draw(np.random.default_rng(0), 4000, 16)
    shares = [(drawn == tokens).mean() for tokens in (3, 7, 32)]
    assert shares == pytest.approx([0.5, 0.25, 0.25], abs=0.01)
    assert drawn.var(axis=1).mean() < 0.7 * drawn.var()  # completions of a prompt have something in common


@pytest.mark.parametrize("lines", ["", "3.5\n", "0\n", "true\n", '{"length": 3}\n', "3\nmany\n", "3\n\xff\n"])
def test_a_log_without_lengths_is_refused(tmp_path, lines):
    log = tmp_path / "lengths"
    log.write_text(lines, encoding="latin1")
    with pytest.raises(LengthError, match=str(log)):
        logged_lengths(log, most=32)


def test_a_group_waits_for_the_slowest_of_its_environments():
    alike = simulate_run(even(environment=(3.0,)), steps=20)
    one_slow = simulate_run(even(environment=(0.0,) * 99 + (3.0,)), steps=20)
    none = simulate_run(even(), steps=20)
    assert none.step < one_slow.step < alike.step


def test_a_law_without_spread_is_one_length():
    law = LengthLaw(100, 0.0, 500)
    assert law.mean == 100 and (law.draw(np.random.default_rng(0), 3, 2) == 100).all()
    assert law_of_mean(100, 500, spread=1e-3).median == pytest.approx(100)


def test_ranks_wait_for_the_one_with_the_most_work():
    times = UpdateTimes(ranks=2, token=1.0)
    assert times.seconds(np.array([4.0, 4, 4, 4])) == 8
    assert times.seconds(np.array([9.0, 1, 1, 1])) == 9  # the longest row
    assert times.seconds(np.array([5.0, 5, 5])) == 10  # two of three rows share a rank
    assert times._replace(minibatches=2).seconds(np.array([9.0, 1, 1, 1])) == 9 + 1
    assert times._replace(pair=0.5, fixed=3, minibatches=2).seconds(np.array([4.0, 4, 4, 4])) == 2 * (4 + 8 + 3)
    assert times._replace(minibatches=4, ranks=1).seconds(np.array([1.0, 2])) == 3  # some mini-batches are empty


class Constant:
    def __init__(self, seconds):
        self.value = seconds

    def seconds(self, lengths):
        return self.value


def even(staleness=0, window=1, **changes):
    """8 groups of two rows of 100 tokens, all on one of four replicas at a time: a batch takes the same time always."""
    schedule = AsyncRun(
        rule=LedgerRule(8, staleness, window),
        samples=2,
        lengths=LengthLaw(100, 0.0, 500),
        prompt=PROMPT,
        engine=TIMES._replace(experts=0.0, row=0.0, token=0.0, read=0.0),
        replicas=4,
        slots=4,
        update=Constant(2.0),
    )
    return schedule._replace(**changes)


GENERATION = 100 * 5e-3  # of a batch: 100 iterations of 5 ms


@pytest.mark.parametrize(
    "schedule,step,age",
    [
        (even(), GENERATION + 2, 0),
        (even(transfer=0.3), GENERATION + 0.3 + 2, 0),
        (even(environment=(1.0,)), GENERATION + 1 + 2, 0),
        (even(1), 2.0, 1),  # generation is hidden behind the update
        (even(1, transfer=0.3), 2.0, 1),
        (even(1, update=Constant(0.1)), GENERATION, 1),  # or the update behind generation
        (even(1, environment=(3.0,)), (3 + GENERATION + 2) / 2, 1),  # two batches are under way in a round
        (even(2, environment=(3.0,)), 2.0, 2),
        (even(pieces=2, update=Constant(1.0)), GENERATION + 2, 0),
    ],
)
def test_a_pipeline_by_hand(schedule, step, age):
    result = simulate_run(schedule, steps=12)
    assert result.step == pytest.approx(step, rel=0.03)
    assert result.age_max == age
    update = schedule.update.value * schedule.pieces
    assert result.trainer_busy == pytest.approx(update / step, rel=0.03)
    assert result.generators_busy == pytest.approx(GENERATION / step, rel=0.05)
    assert result.tokens == pytest.approx(8 * 2 * (PROMPT + 100) / step, rel=0.03)
    assert result.steps_per_hour == pytest.approx(3600 / step, rel=0.03)


def test_ages_stay_within_the_bound_and_a_window_makes_groups_younger():
    law = LengthLaw(100, 1.0, 2000)
    results = {}
    for staleness in (0, 1, 2):
        for window in (1, 8):
            schedule = even(staleness, window, lengths=law, update=Constant(0.3))
            result = simulate_run(schedule, steps=20)
            assert result.age_max <= schedule.rule.most_age
            results[staleness, window] = result
    assert results[2, 1].step < results[1, 1].step < results[0, 1].step
    assert results[1, 8].step < results[1, 1].step  # a late group holds nobody up
    again = simulate_run(even(1, 8, lengths=law, update=Constant(0.3)), steps=20)
    assert again == results[1, 8] != simulate_run(even(1, 8, lengths=law, update=Constant(0.3)), steps=20, seed=1)
    assert math.isfinite(again.age_mean)


def test_pieces_divide_a_batch():
    with pytest.raises(ValueError, match="8 groups of a batch cannot be 3 equal pieces"):
        simulate_run(even(pieces=3))


def test_lengths_of_a_log_are_read_again_only_when_it_has_changed(tmp_path):
    log = tmp_path / "lengths"
    log.write_text("3\n8\n9\n40\n")
    settings = settings_of(lengths=str(log), dry_run=True)
    lengths = lengths_of(settings, 8)
    assert lengths_of(settings, 8) is lengths and lengths_of(settings, 10) == LoggedLengths((3, 8, 9, 10), cut=1)
    assert cut_remarks(lengths) == ["2 of 4 lengths are cut at 8 tokens (--max_new_tokens)"]
    log.write_text("3\n")
    os.utime(log, ns=(1, 1))
    assert lengths_of(settings, 8) == LoggedLengths((3,)) and not cut_remarks(LoggedLengths((3,)))
    assert not cut_remarks(parse_lengths("mean:5,max:9"))
