"""The simulation against published times of asynchronous systems. Only laws of lengths are fitted, one a system.

Hardware rates, model sizes, groups, devices and, where they are published, times of updates are theirs. The rules of
verl and AReaL are members of ours: both bound what is submitted, and consume in the order of completion, which is a
window that never closes.
"""

import functools

import numpy as np
import pytest
from selection import quick

from funrl.cost.schedules import (
    AsyncRun,
    LengthLaw,
    UpdateTimes,
    engine_times,
    law_of_mean,
    rows_together,
    simulate_run,
)
from funrl.cost.tracing.hardware import HARDWARE
from funrl.models import decoder_config, decoder_model
from funrl.models.decoder.experts import Experts
from funrl.rollout.ledger import LedgerRule

COMPLETION_ORDER = 10**9
H20 = HARDWARE["h200"]._replace(memory=96e9, half=148e12, bandwidth=4e12)  # its data sheet
H800 = HARDWARE["h100"]._replace(link=200e9)


class Taken:
    """Seconds of an update, as published."""

    def __init__(self, seconds):
        self.value = seconds

    def seconds(self, lengths):
        return self.value


def qwen(**sizes):
    return decoder_model(decoder_config(vocab=152064, max_positions=32768, eos=(1,), pad=0, head=128, **sizes))


# verl, docs/advance/fully_async.md, 128-card stale ablation: Qwen2.5-Math-7B on 64 + 64 H20, 512 prompts of 16, four
# updates between syncs. staleness_threshold -> (step, gen, update_actor) in seconds; gen is the trainer's wait.
VERL = {0.0: (231.34, 128.47, 98.77), 0.1: (171.30, 58.17, 109.12), 0.3: (146.11, 38.88, 103.22)} | {
    0.5: (150.63, 33.14, 113.16)
}
VERL_LENGTHS = LengthLaw(median=2100, spread=0.6, most=28672)


def verl(threshold):
    step, wait, _ = VERL[threshold]
    engine = engine_times(qwen(embed=3584, layers=28, heads=28, kv_heads=4, mlp=18944), H20)
    rule = LedgerRule(places=512, staleness=threshold, window=COMPLETION_ORDER)
    update = Taken((step - wait) / 4)  # what the trainer does besides waiting, its syncs included
    return simulate_run(AsyncRun(rule, 16, VERL_LENGTHS, 200, engine, 64, 256, update, pieces=4), steps=10)


@pytest.mark.parametrize("threshold", (0.0, 0.5))
def test_steps_of_verl_by_staleness(threshold):
    assert verl(threshold).step == pytest.approx(VERL[threshold][0], rel=0.15)


# AReaL, arXiv 2505.24298: thousands of tokens a second by the maximum staleness, R1-distilled 1.5B on 48 + 16 H800, 512
# prompts of 16, up to 27,648 new tokens, four mini-batches. Neither mean lengths nor times of updates are published:
# an update scores once and trains once, at the rates of the table of hardware.
AREAL = {0: 129, 1: 269, 2: 357, 4: 357, 8: 372, 16: 397}
AREAL_LENGTHS = LengthLaw(median=6500, spread=1.0, most=27648)


@functools.cache
def areal(staleness):
    model = qwen(embed=1536, layers=28, heads=12, kv_heads=2, mlp=8960)
    engine = engine_times(model, H800)
    rate = H800.half * H800.efficiency.product
    pair = 2 * model.abilities.cost.queries / rate  # half of the pairs of a row's tokens are attended to
    update = UpdateTimes(ranks=16, token=4 * engine.row, pair=4 * pair, minibatches=4)
    rule = LedgerRule(places=512, staleness=staleness, window=COMPLETION_ORDER)
    slots = rows_together(engine, 256, 300 + AREAL_LENGTHS.mean)
    schedule = AsyncRun(rule, 16, AREAL_LENGTHS, 300, engine, 48, slots, update, transfer=2.0)
    return simulate_run(schedule, steps=8 + staleness)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", quick((1, 4, 16), (1, 4)))
def test_throughput_of_areal_by_staleness(staleness):
    ratio = areal(staleness).tokens / areal(0).tokens
    assert ratio == pytest.approx(AREAL[staleness] / AREAL[0], rel=0.2)


# NeMo-RL 0.6, performance summary: Qwen3-30B-A3B on 16 GB200, 64 prompts of 32, rows of up to 4,096 tokens, in the mean
# 3,158. On policy with shared devices a step takes 221 s; one step off policy, on 8 + 8 devices, 301 s.
NEMO_SHARED = 221.0
NEMO_SPLIT = 301.0


def test_a_split_that_loses_is_predicted_as_a_loss():
    model = decoder_model(
        decoder_config(
            vocab=151936,
            embed=2048,
            layers=48,
            heads=32,
            kv_heads=4,
            head=128,
            mlp=6144,
            max_positions=40960,
            eos=(1,),
            pad=0,
            qk_norm=True,
            experts=Experts(count=128, per_token=8, mlp=768),
        )
    )
    prompt = 150
    law = law_of_mean(3158 - prompt, 4096 - prompt)
    rule = LedgerRule(places=64)
    shared = AsyncRun(rule, 32, law, prompt, engine_times(model, HARDWARE["gb200"]), 16, 256, Taken(1.0))
    generation = simulate_run(shared, steps=10).step - 1.0
    assert 50 < generation < 90  # the rest of the published step is the update's
    rows = law.draw(np.random.default_rng(0), 64, 32).reshape(-1) + prompt
    alone = UpdateTimes(ranks=16, token=1.0)
    update = alone._replace(token=(NEMO_SHARED - generation) / alone.seconds(rows))
    rule = LedgerRule(places=64, staleness=1)
    split = shared._replace(rule=rule, replicas=8, update=update._replace(ranks=8))
    result = simulate_run(split, steps=12)
    assert result.step > 1.2 * NEMO_SHARED  # half of the devices take twice the time to train
    assert result.step == pytest.approx(NEMO_SPLIT, rel=0.1)
    assert result.generators_busy < 0.5 and result.trainer_busy > 0.95
