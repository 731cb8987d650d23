"""The dry run of generation: how many rows go together, their cache, and how often."""

import dataclasses
import itertools

import pytest
from dry_jobs import CPU, plain, small, write_config

from funrl import trees
from funrl.cost import decoding, dry_run
from funrl.cost.tracing.hardware import USABLE
from funrl.mesh.mesh import single
from funrl.models.decoder.gated_delta_net import GatedDeltaNet
from funrl.models.decoder.latent_attention import LatentSizes
from funrl.trainer.jobs import build as trainer_build
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import with_flags


def with_cache(job, gigabytes, rows=512):
    settings = with_flags(job.settings, kv_cache_gb=gigabytes, decode_rows=rows)
    return dataclasses.replace(job, settings=settings)


@pytest.mark.slow
def test_the_cache_has_its_closed_form():
    job = small()
    estimate = dry_run.estimate(job, 8, CPU)
    cache = job.model.init_cache(single(), 16 * 2, 16, job.dtype)  # 16 rows of 32 tokens, two pages each
    assert estimate.phases["generate"].peak["cache"] == trees.nbytes(cache)


@pytest.mark.slow
def test_the_cache_is_that_of_the_rank_with_most_prompts():
    job = small(mesh="dp3", batch_prompts=8)
    peak = dry_run.estimate(job, 3, CPU).phases["generate"].peak["cache"]
    assert peak == trees.nbytes(job.model.init_cache(single(), 3 * 2 * 2, 16, job.dtype))  # prompts, samples, pages


@pytest.mark.slow
def test_a_latent_cache_has_its_closed_form_and_latent_attention_its_flops():
    """One vector of 24 + 4 numbers a token, and the products of decoding with it."""
    sizes = {"family": "deepseek_v3", "kv_heads": 4, "head": 12, "latent": LatentSizes(24, None, 8, 4, 6)}
    short, long = (dry_run.estimate(small("grpo", sizes=sizes, max_new_tokens=n), 8, CPU) for n in (24, 56))
    results = [estimate.phases["generate"] for estimate in (short, long)]
    assert [element.peak["cache"] for element in results] == [16 * 2 * tokens * (24 + 4) * 4 for tokens in (32, 64)]
    heads, layers, rows = 4, 2, 16
    more = [item.flops / steps for item, steps in zip(results, (24, 56), strict=True)]
    assert 0.5 < (more[1] - more[0]) / (rows * layers * heads * 4 * (24 + 4) * 16) < 2


@pytest.mark.slow
def test_states_are_in_the_cache_and_do_not_grow():
    """A cell for each of 16 rows: 4 heads of 8 x 6 numbers, and 3 tokens of 56 channels; keys of the other layer."""
    mixer = GatedDeltaNet(2, 4, 8, 6)
    sizes = {"family": "qwen3_next", "mixers": (mixer, None)}
    short, long = (small("grpo", sizes=sizes, max_new_tokens=n) for n in (24, 56))
    results = [dry_run.estimate(job, 8, CPU).phases["generate"] for job in (short, long)]
    cost = short.model.abilities.cost
    state = 4 * 8 * 6 + 3 * (2 * 2 * 8 + 4 * 6)
    assert cost.state() == state and cost.state(2) == state / 2 and cost.state(4) == state / 2
    assert short.model.cell_bytes(single(), short.dtype) == 4 * state
    pages = [16 * tokens * cost.cached() * 4 for tokens in (32, 64)]
    assert [estimate.peak["cache"] for estimate in results] == [16 * 4 * state + some for some in pages]


@pytest.mark.slow
def test_the_cache_of_a_deep_model_holds_the_rows_that_fit_at_its_own_depth():
    row = 7 * 2 * 1 * 8 * 4 * 32  # layers, keys and values, a tensor rank's heads of 8, float32, two pages of 16
    job = with_cache(small("grpo", sizes={"layers": 7}, mesh="tp2", generate_mesh="tp2"), 5.5 * row / 1e9)
    phase = dry_run.estimate(job, 8, CPU).phases["generate"]
    assert phase.peak["cache"] == 5 * row
    # 16 rows in 4 waves; each pass gathers the logits once, those over prompts too, and reduces layers twice.
    steps = 4 * 24
    gathers = [traffic.count for (op, _), traffic in phase.traffic.items() if op == "all_gather_into_tensor"]
    assert steps <= gathers[0] <= steps + 16
    reduces = [traffic.count for (op, _), traffic in phase.traffic.items() if op == "all_reduce"]
    assert reduces[0] >= steps * (1 + 2 * 7)


@pytest.mark.slow
def test_where_no_flag_says_so_the_cache_takes_half_of_what_is_left():
    hardware = CPU._replace(memory=2.5e6)
    job = small("grpo", memory=hardware.memory, batch_prompts=64, samples_per_prompt=4)
    peak = dry_run.estimate(job, 8, hardware).phases["generate"].peak
    left = USABLE * hardware.memory - peak["weights"] - peak["optimizer"]  # with the engine's own copy of the weights
    assert left / 3 < peak["cache"] <= left / 2


@pytest.mark.slow
def test_prompts_are_read_once_however_few_rows_fit():
    first, all_rows = (
        dry_run.estimate(with_cache(small("grpo", sizes={"layers": 1}), None, rows), 40, CPU).phases["generate"].flops
        for rows in (1, 16)
    )
    assert first == pytest.approx(all_rows, rel=0.02)


@pytest.mark.slow
def test_a_deep_model_is_on_the_line_however_many_rows_fit(monkeypatch):
    together = 5
    job = small("grpo", sizes={"layers": 7})
    row = trees.nbytes(job.model.init_cache(single(), 2, 16, job.dtype))
    job = with_cache(job, together * row / 1e9)
    shallow = dry_run.estimate(job, 8, CPU).phases["generate"]
    monkeypatch.setattr(dry_run.tracing, "of_all_layers", lambda job, costs: costs(job))
    whole = dry_run.estimate(job, 8, CPU).phases["generate"]
    assert shallow.peak["cache"] == whole.peak["cache"] == together * row
    assert shallow.total == pytest.approx(whole.total, rel=0.02)
    assert shallow.flops == pytest.approx(whole.flops) and shallow.seconds == pytest.approx(whole.seconds, rel=0.02)


def engine_work(job, generator, prompt_tokens):
    return decoding.EngineWork(job, generator, generator, prompt_tokens, room=1e9, hardware=CPU)


def test_the_last_rows_are_decoded_by_themselves():
    job = small("grpo")
    parts = trainer_build.build(job, single(), lambda _: None)
    rows = {16: [(1, 16)], 5: [(3, 5), (1, 1)], 1: [(16, 1)], 100: [(1, 16)]}
    for most, expected in rows.items():
        waves = decoding.waves(engine_work(with_cache(job, None, most), parts.generator, 8), job.sampling)
        assert waves == expected


@pytest.mark.slow
def test_remax_generates_greedily_too():
    with_greedy, without = (
        dry_run.estimate(small(name, sizes={"layers": 1}), 8, CPU).phases["generate"] for name in ("remax", "grpo")
    )
    # One more completion a prompt: 3 of them instead of 2, and the prompt is read once more.
    assert 1.4 < with_greedy.flops / without.flops < 2
    assert with_greedy.seconds > 1.4 * without.seconds


@pytest.mark.slow
def test_a_judge_writes_a_verdict_on_every_completion(tmp_path):
    """As if it were the policy, with the completions as its prompts, at all layers; its weights stay."""
    config = write_config(tmp_path, num_hidden_layers=5)
    (tmp_path / "template.txt").write_text("Is {{completion}} right?")  # 10 characters beside it: 3 tokens
    judge = {"prompts": "p.jsonl", "judge": config, "judge_template": str(tmp_path / "template.txt")}
    job = small("grpo", sizes={"layers": 1}, judge_max_new_tokens=8, **judge)
    record, without = (dry_run.estimate(item, 8, CPU).phases for item in (job, dataclasses.replace(job, judge=None)))
    assert [name for name in record if name not in without] == ["score_judge"] == list(record)[1:2]
    for name, costs in without.items():
        assert record[name].peak["weights"] - costs.peak["weights"] == trees.nbytes(job.judge.model.shapes), name
    first = plain("grpo", model=config, prompts="p.jsonl", batch_prompts=16, samples_per_prompt=1, max_new_tokens=8)
    generator = trainer_build.build(first, single(), lambda _: None).generator
    alone = decoding.generation(engine_work(first, generator, 8 + 24 + 3))
    assert record["score_judge"].flops == pytest.approx(alone.flops)
    assert record["score_judge"].seconds == pytest.approx(alone.seconds, rel=0.05)  # it draws greedily
    assert record["score_judge"].peak["cache"] == alone.peak["cache"]
    with pytest.raises(SettingsError, match=r"it reads 35 tokens and may write 4090 .*, but it has 4096 positions"):
        dry_run.estimate(small("grpo", judge_max_new_tokens=4090, **judge), 8, CPU)


FROZEN = (None, "other:frozen", "other:frozen:5")
SECOND = (None, "other:policy:second")


@pytest.mark.slow
def test_agents_hold_weights_and_caches():
    """Once in an engine of their own; an earlier self that is renewed once more, for the checkpoint."""
    jobs = [small("grpo", task="calculator", agents=agents) for agents in FROZEN]
    plain, kept, renewed = (dry_run.estimate(job, 10, CPU).phases for job in jobs)
    nbytes = trees.count(jobs[0].model.shapes) * jobs[0].dtype.itemsize
    for phase in ("generate", "reshard", "update_policy"):
        weights = [phases[phase].peak["weights"] for phases in (plain, kept, renewed)]
        assert [after - before for before, after in itertools.pairwise(weights)] == [nbytes, nbytes], phase
    assert kept["generate"].peak["cache"] == 2 * plain["generate"].peak["cache"]


@pytest.mark.slow
def test_a_second_policy_holds_what_the_first_one_holds():
    plain, two = (small("grpo", task="calculator", agents=agents) for agents in SECOND)
    row, both = (dry_run.estimate(job, 10, CPU).phases for job in (plain, two))
    model = trees.count(plain.model.shapes) * plain.dtype.itemsize
    assert both["generate"].peak["weights"] - row["generate"].peak["weights"] == 2 * model  # its own and its engine's
    assert both["update_second"].peak["optimizer"] == 2 * row["update_policy"].peak["optimizer"]
    assert {"score_second", "update_second"} <= both.keys() - row.keys()
