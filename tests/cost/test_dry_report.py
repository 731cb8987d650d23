"""What a dry run prints, and what it proposes where a run does not fit."""

import dataclasses
import json
import math
import os
import re

import pytest
from dry_jobs import CPU, H100, settings, small, write_config
from selection import quick

from funrl.cli.run import main
from funrl.cost import dry_run
from funrl.cost import report as dry_report
from funrl.cost.tracing.costs import Costs
from funrl.cost.tracing.estimate import Estimate
from funrl.cost.verdict import rates_of, remedies, verdict_of
from funrl.trainer.settings.settings import settings_flags, with_flags

PHASES = {  # of a step of an experiment of each kind, beside generate, advantage, reshard and verify
    "ppo": {"score_policy", "score_reference", "score_critic", "update_critic", "update_policy"},
    "dapo": {"score_policy", "update_policy"},
    "remax": {"score_policy", "score_reference", "update_policy"},
    "prime": {"score_policy", "score_reference", "score_implicit_reward", "update_implicit_reward", "update_policy"},
    "sft": {"update_policy"},
    "dpo": {"score_reference", "update_policy"},
    "reward_model": {"update_reward_model"},
}
TEXTS = ("sft", "dpo", "reward_model")


def phases_of(message):
    rows = message.split("a step of a rank")[1].split("\nall ")[0].splitlines()[2:]
    return {row.split()[0] for row in rows}


@pytest.mark.parametrize("name", quick(PHASES, ["ppo", "reward_model"]))
def test_every_experiment_is_estimated_by_its_command(name, capsys):
    flags = ["--dry_run", "--hardware=cpu", "--batch_prompts=4"] + ["--minibatches=2"] * (name not in TEXTS)
    assert main(name, [name, *flags], name) == 0
    around = set() if name in TEXTS else {"generate", "advantage", "reshard", "verify"}
    output = capsys.readouterr().out
    assert phases_of(output) == PHASES[name] | around
    assert "fits: the most that a rank holds" in output


@pytest.mark.slow
def test_any_recipe_is_estimated_with_a_teacher_of_another_size(tmp_path, capsys):
    folder = tmp_path / "teacher"
    folder.mkdir()
    teacher = write_config(folder, num_hidden_layers=5)
    model = write_config(tmp_path, num_hidden_layers=1)
    flags = ["--algorithm=distillation", f"--teacher={teacher}", f"--model={model}", "--prompt_tokens=8", "--dry_run"]
    flags += ["--hardware=cpu", "--samples_per_prompt=2", "--max_new_tokens=8"]
    assert main("rl", ["rl", *flags, "--batch_prompts=4", "--mesh=dp2,tp2", "--fsdp"]) == 0
    output = capsys.readouterr().out
    assert {"score_teacher", "update_policy"} <= phases_of(output) and "score_reference" not in output
    beside = [flag.replace("=distillation", "=gkd") for flag in flags]  # the teacher runs in the update itself
    assert main("rl", ["rl", *beside, "--batch_prompts=4"]) == 0
    assert phases_of(capsys.readouterr().out) == {"generate", "update_policy", "reshard", "verify"}
    assert main("rl", ["rl", *[flag for flag in flags if "teacher" not in flag]]) == 2
    assert "give --teacher=DIR" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_prints_everything_and_starts_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = write_config(tmp_path, num_hidden_layers=1)
    flags = [f"--model={model}", "--mesh=dp2,tp2", "--batch_prompts=4", "--samples_per_prompt=2", "--max_new_tokens=8"]
    monkeypatch.setattr(os, "fork", None)
    assert main("grpo", ["grpo", *flags, "--prompt_tokens=8", "--reward_workers=4", "--dry_run"]) == 0
    output = capsys.readouterr().out
    for word in (
        "peak memory of a rank",
        "update_policy",
        "optimizer",
        "all_reduce",
        "fits: the most that a rank holds",
    ):
        assert word in output
    assert not (tmp_path / "runs").exists()
    for wrong, why in (("--hardware=tpu", "it must be one of a100"), ("--prompt_tokens=5000", "4096 positions")):
        assert main("grpo", ["grpo", *flags, "--dry_run", wrong]) == 2
        assert why in capsys.readouterr().err
    assert main("grpo", ["grpo", *flags, "--hardware=h200"]) == 2
    assert "give --dry_run too" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ("dpo", "reward_model"))
def test_texts_have_flags_of_their_own(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(dry_report.HARDWARE, "cpu", CPU._replace(memory=4e6))
    model = write_config(tmp_path, num_hidden_layers=2, vocab_size=2048)
    flags = [f"--model={model}", "--mesh=dp4", "--batch_prompts=64", "--text_tokens=100", "--dry_run"]
    assert main(name, [name, *flags, "--hardware=cpu"], name) == 0
    output = capsys.readouterr().out
    assert "update_" in output and ("\nscore_reference " in output) == (name == "dpo") and "does not fit: " in output
    assert "generate" not in output and "reshard" not in output and "not counted: tokenizer, files" in output
    tried = [line for line in output.splitlines() if line.startswith("  with ")]
    assert tried and set(re.findall(r"--(\w+)", " ".join(tried))) <= {
        name for name, flag in settings_flags().items() if "supervised" in flag.kinds
    }
    assert not (tmp_path / "runs").exists()
    for wrong, why in (
        (
            "--text_tokens=5000",
            f"--text_tokens=5000: a row has {5000 + (name == 'reward_model')} tokens, and the model 4096 positions",
        ),
        ("--text_tokens=0", "it must be at least 1"),
        ("--prompt_tokens=8", "--prompt_tokens has no effect in learning from given texts"),
        ("--fsdp_models=critic", "does nothing without --fsdp; give --fsdp too"),
    ):
        others = [flag for flag in flags if flag.split("=")[0] != wrong.split("=")[0]]
        assert main(name, [name, *others, wrong], name) == 2
        assert why in capsys.readouterr().err
    assert main(name, [name, *flags, "--fsdp", "--fsdp_models=critic"], name) == 2
    assert "--fsdp_models=critic: this run has no critic; it has " in capsys.readouterr().err
    assert main(name, [name, "--text_tokens=9"], name) == 2
    assert "--text_tokens=9 does nothing without --dry_run; give --dry_run too" in capsys.readouterr().err


@pytest.mark.slow
def test_a_task_of_episodes_is_estimated_with_its_turns(capsys, monkeypatch):
    flags = ["--dry_run", "--task=calculator", "--batch_prompts=4", "--assume_tool_seconds=0.5"]
    assert main("grpo", ["grpo", *flags], "grpo") == 0
    line = capsys.readouterr().out
    assert "32 episodes of 2 replies, 37 tokens each" in line
    assert "an engine reads 192 tokens of later turns; of 32 unfinished episodes 32 generate at a time" in line
    assert "environments take 500 ms before each later reply: 500 ms of a step are waited for, 0 s overlap" in line
    assert (
        "branches of episodes, replies of frozen agents, and the work of environments" in line.split("not counted: ")[1]
    )
    assert main("grpo", ["grpo", *flags, "--json"], "grpo") == 0
    episodes = json.loads(capsys.readouterr().out)["episodes"]
    assert (episodes["turns"], episodes["turn_tokens"], episodes["read_tokens"]) == (2, 6, 192)
    assert episodes["waited_seconds"] == 0.5 and episodes["recomputed_tokens"] == 0
    for wrong, why in (
        (["--assume_turns=17"], "--assume_turns=17 is more than --episode_turns=16"),
        (["--assume_turns=9"], "--assume_turns=9 --assume_turn_tokens=6: a row has "),
    ):
        assert main("grpo", ["grpo", *flags, *wrong], "grpo") == 2
        assert why in capsys.readouterr().err


@pytest.mark.slow
def test_what_is_left_out_is_said(capsys):
    flags = ["--dry_run", "--batch_prompts=4", "--samples_per_prompt=2", "--offload=optimizer", "--eval_every=7"]
    assert main("dapo", ["dapo", *flags]) == 0
    line = capsys.readouterr().out
    for words in (
        "rewards, tokenizer, files",
        "evaluation every 7 steps",
        "7 more batches",
        "the time of offloading copies",
    ):
        assert words in line.split("not counted: ")[1]


@pytest.mark.parametrize(
    ("hardware", "flags", "shares"),
    [(CPU, {}, True), (H100, {}, False), (CPU, {"samples_per_prompt": 1}, False)],
)
def test_prompts_that_completions_share_are_not_counted(hardware, flags, shares):
    left_out = dry_run.left_out(small("grpo", **flags), None, hardware)
    assert any("plain layers on a CPU compute once" in text for text in left_out) == shares


def made_up(job, **phases):
    """An estimate with these bytes by kind in each phase."""
    results = {name: Costs({"other": held}) for name, held in phases.items()}
    return Estimate(job, ("policy",), "of a test", 32, results, {}, 1, 1, {}, ())


def verdict(result, flags, costs):
    return dry_report.verdict(verdict_of(result, flags, H100, costs), H100)


def test_hours_and_tokens_a_second_are_those_of_the_steps():
    job = small("grpo", steps=360, mesh="dp4")
    estimate = made_up(job, generate={"weights": 1e9}, update_policy={"weights": 2e9})
    for costs, seconds in zip(estimate.phases.values(), (3.0, 5.0), strict=True):
        costs.seconds = seconds
    rates = rates_of(estimate, H100)
    assert (rates.seconds, rates.hours, rates.tokens) == (8.0, 0.8, 8 * 2 * 32)
    assert (rates.tokens_per_second, rates.tokens_per_second_per_device) == (64.0, 16.0)
    rate = dry_report.rate(estimate, H100)
    assert rate == "a step takes 8 s, --steps=360 take 48 min: 64 tokens a second, 16 of each device"


def test_json_is_one_object_with_the_numbers_of_the_tables(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(dry_report.HARDWARE, "cpu", CPU._replace(memory=4e6))
    model = write_config(tmp_path, num_hidden_layers=1, vocab_size=2048)
    flags = [f"--model={model}", "--mesh=dp4", "--batch_prompts=64", "--text_tokens=100", "--hardware=cpu", "--steps=9"]
    assert main("sft", ["sft", *flags, "--dry_run", "--json"], "sft") == 0
    record = json.loads(capsys.readouterr().out)
    assert set(record) == {
        "model",
        "hardware",
        "devices",
        "mesh",
        "generate_mesh",
        "fsdp",
        "step",
        "run",
        "phases",
        "fits",
        "peak",
        "suggestions",
        "not_counted",
        "episodes",
    }
    assert (record["devices"], record["mesh"], record["generate_mesh"], record["fits"]) == (4, "dp4", None, False)
    phase = record["phases"]["update_policy"]
    kinds = {kind: nbytes for kind, nbytes in phase["peak_bytes"].items() if kind != "total"}
    assert sum(kinds.values()) == pytest.approx(phase["peak_bytes"]["total"], abs=9)
    assert record["peak"]["bytes"] == math.ceil(phase["peak_bytes"]["total"]) > record["hardware"]["usable_bytes"]
    phases = record["phases"].values()
    seconds = sum(row["kernel_seconds"] + row["collective_seconds"] - row["hidden_seconds"] for row in phases)
    assert record["step"]["seconds"] == pytest.approx(seconds) and record["step"]["tokens"] == 6400
    assert record["run"]["hours"] == pytest.approx(9 * seconds / 3600)
    first = record["suggestions"][0]
    assert first["flags"] == {"remat": "full"} and first["seconds"] > 0 and {"axes", "bytes"} < set(phase["traffic"][0])
    assert main("sft", ["sft", "--json"], "sft") == 2
    assert "--json does nothing without --dry_run" in capsys.readouterr().err


def test_what_does_not_fit_is_said_with_the_flag_that_helps():
    job = small("grpo", sizes={"layers": 1})
    job = dataclasses.replace(job, sizes=job.sizes | {"data": 4})
    estimate = made_up(job, update_policy={"weights": 60e9, "optimizer": 40e9, "activations": 2e9})
    estimate.phases["update_policy"].seconds = 10.0
    helped = made_up(job, update_policy={"weights": 20e9})
    helped.phases["update_policy"].seconds = 15.0
    tried = []

    def costs(changed):
        tried.append(changed)
        return helped

    message = verdict(estimate, settings(mesh="dp4"), costs)
    assert "does not fit: a rank needs 102 GB" in message
    assert "with --fsdp: 20 GB, in update_policy (fits); a step takes 15 s, 50% longer" in message
    assert len(tried) == 1 and tried[0].sharding.fsdp
    assert verdict(helped, settings(), costs).startswith("fits: ")


def test_flags_are_tried_together_and_one_that_cannot_work_is_left_out():
    job = small("grpo", sizes={"layers": 1})
    job = dataclasses.replace(job, sizes=job.sizes | {"data": 4})
    result = made_up(job, update_policy={"weights": 40e9, "activations": 60e9})
    tried = []

    def costs(changed):
        tried.append(changed)
        if changed.devices.remat == "full":
            raise ValueError("not with this model")
        return result

    message = verdict(result, settings(mesh="dp4", token_budget=4096), costs)
    assert [(item.sharding.fsdp, item.devices.remat, item.updates.token_budget) for item in tried] == [
        (True, "none", 4096),
        (True, "full", 4096),
        (True, "none", 1024),
    ]
    assert [line for line in message.splitlines() if line.startswith("  with ")] == [
        "  with --fsdp: 100 GB, in update_policy; a step takes 0 s",
        "  with --fsdp --token_budget=1024: 100 GB, in update_policy; a step takes 0 s",
    ]


def test_the_budget_of_the_phase_that_is_too_large_is_lowered():
    job = small("grpo", sizes={"layers": 1})
    estimate = made_up(
        job, score_policy={"activations": 90e9}, update_policy={"activations": 90e9}, generate={"activations": 90e9}
    )
    given = settings(token_budget=4096)
    asked = {name: remedies(estimate, given, H100, name) for name in estimate.phases}
    assert {"score_token_budget": 4096} in asked["score_policy"] and {"token_budget": 1024} in asked["update_policy"]
    assert not any("token_budget" in flag for changes in asked["generate"] for flag in changes)


def test_a_cache_that_is_too_large_asks_for_fewer_samples():
    job = small("grpo", sizes={"layers": 1})
    result = made_up(job, generate={"cache": 90e9})
    asked = remedies(result, settings(samples_per_prompt=8), H100, "generate")
    assert {"samples_per_prompt": 4} in asked
    assert with_flags(settings(), **asked[0]).sampling.samples_per_prompt == 4
