"""The dry run of generation: how many rows go together, their cache, and how often."""

import functools

import pytest
from dry_jobs import CPU, H100, LLAMA_70B, plain, small, write_config

from funrl import trees
from funrl.cost import dry_run
from funrl.mesh.mesh import single
from funrl.rollout.native import native_engine
from funrl.trainer import build as trainer_build


def test_the_cache_has_its_closed_form():
    job = small()
    found = dry_run.estimate(job, 8, CPU)
    rows, length = 16, 32
    cache = job.model.init_cache(single(), rows, length, job.dtype)
    assert found.phases["generate"].peak["cache"] == trees.nbytes(cache)


def test_the_cache_of_a_deep_model_holds_the_rows_that_fit_at_its_own_depth(tmp_path):
    job = plain(
        "grpo", H100.memory, model=write_config(tmp_path, **LLAMA_70B), mesh="dp64,tp8", generate_mesh="dp64,tp8",
        dtype="bfloat16", batch_prompts=1024, samples_per_prompt=16, max_new_tokens=32768, token_budget=65536,
        fsdp=True,
    )  # fmt: skip
    found = dry_run.estimate(job, 512, H100).phases["generate"]
    row = 80 * 2 * (8 // 8) * 128 * 2 * (512 + 32768)  # layers, keys and values, a tensor rank's heads, bfloat16
    together = 16 * 10**9 // row
    assert together == 11
    assert found.peak["cache"] == pytest.approx(together * row) and found.peak["cache"] < 16e9
    # 256 rows a rank in 24 chunks; each step of a chunk gathers the logits once, and layers twice.
    steps = (256 // together + 1) * 32768
    gathers = [traffic.count for (op, _), traffic in found.traffic.items() if op == "all_gather_into_tensor"]
    assert gathers == [steps]
    reduces = [traffic.count for (op, _), traffic in found.traffic.items() if op == "all_reduce"]
    assert reduces[0] >= steps * (1 + 2 * 80)


@pytest.mark.parametrize("together", [16, 5, 1])
def test_a_deep_model_is_on_the_line_however_many_rows_fit(together, monkeypatch):
    job = small("grpo", sizes={"layers": 6})
    row = trees.nbytes(job.model.init_cache(single(), 1, 32, job.dtype))
    engine = functools.partial(native_engine, cache_bytes=together * row)
    monkeypatch.setattr(trainer_build, "native_engine", engine)
    shallow, parts = (
        dry_run.estimate(job, 8, CPU).phases["generate"],
        trainer_build.build(job, single(), lambda _: None),
    )
    monkeypatch.setattr(dry_run, "of_all_layers", lambda job, costs: costs(job))
    whole = dry_run.estimate(job, 8, CPU).phases["generate"]
    assert parts.generator.engine.rows(32) == together
    assert shallow.peak["cache"] == whole.peak["cache"] == together * row
    assert shallow.total == pytest.approx(whole.total, rel=0.02)
    assert shallow.flops == pytest.approx(whole.flops) and shallow.seconds == pytest.approx(whole.seconds, rel=0.02)


def test_the_last_rows_are_decoded_by_themselves():
    job = small("grpo")
    parts = trainer_build.build(job, single(), lambda _: None)
    rows = {16: [(1, 16)], 5: [(3, 5), (1, 1)], 1: [(16, 1)], 100: [(1, 16)]}
    for most, expected in rows.items():
        engine = native_engine(job.model, max_rows=most)
        generator = parts.generator._replace(engine=engine)
        assert dry_run.chunks(job, generator, job.sampling, 8) == expected


def test_remax_generates_greedily_too():
    with_greedy, without = (
        dry_run.estimate(small(name, sizes={"layers": 1}), 8, CPU).phases["generate"] for name in ("remax", "grpo")
    )
    # One more completion a prompt: 3 of them instead of 2, and the prompt is read once more.
    assert 1.4 < with_greedy.flops / without.flops < 2
    assert with_greedy.seconds > 1.4 * without.seconds
