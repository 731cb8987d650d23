"""The dry run of learning from given texts, against runs that compute, and as a command prints it."""

import dataclasses
import functools
import re

import pytest
import torch
from test_dry_run import CPU, H100, write_config

from funrl import trees
from funrl.cost import dry_report, dry_supervise
from funrl.experiments import dpo, reward_model, sft
from funrl.experiments.run import main
from funrl.mesh.mesh import single
from funrl.models import decoder
from funrl.trainer import supervise
from funrl.trainer.settings import Settings, settings_flags

SIZES = {"embed": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head": 8, "mlp": 96, "vocab": 300}
COURSES = {
    "sft": (sft.algorithm, "demonstrations", "likelihoods"),
    "dpo": (dpo.algorithm, "preferences", "likelihoods"),
    "dpo without a reference": (functools.partial(dpo.algorithm, reference=False), "preferences", "likelihoods"),
    "reward_model": (functools.partial(reward_model.algorithm, margin=True), "preferences", "rewards"),
}
EXPERIMENTS = ("sft", "dpo", "reward_model")


def settings(**given):
    return Settings(**{"minibatches": 1, "batch_prompts": 16, "token_budget": 256} | given)


def course(name, memory=CPU.memory, **given):
    return dry_supervise.plain_course(settings(**given), COURSES[name][0], memory, *COURSES[name][1:])


def small(name, **given):
    one = course(name, **given)
    sizes = SIZES | {k: given[k] for k in SIZES if k in given}
    return one._replace(job=one.job._replace(config=dataclasses.replace(one.job.config, **sizes)))


@pytest.mark.parametrize("given", [{}, {"remat": "full", "token_budget": 4096}])
@pytest.mark.parametrize("name", COURSES)
def test_the_pretended_update_holds_what_the_real_one_holds(name, given):
    one = small(name, **given)
    methods = supervise.build(one, single(), lambda _: None)
    fake = dry_supervise.trace(one, methods, 30, 16, CPU)
    real = dry_supervise.trace(one, methods, 30, 16, CPU, real=True)
    assert set(fake.phases) == set(real.phases) == {"update_actor"} | ({"ref"} if name == "dpo" else set())
    for phase, costs in real.phases.items():
        assert fake.phases[phase].total == pytest.approx(costs.total, rel=0.1), phase
        assert fake.phases[phase].flops == pytest.approx(costs.flops), phase
    assert fake.resting == real.resting


def test_rows_are_those_of_the_trainer():
    batch = dry_supervise.full_batch(small("reward_model"), 30, 4)
    assert batch.tokens.shape == (4, 64) and batch.length.tolist() == [62] * 4  # two texts of 30 tokens and one to read
    assert batch.mask.sum(1).tolist() == [2] * 4 and batch.margin is not None
    batch = dry_supervise.full_batch(small("dpo"), 30, 4)
    assert batch.mask.sum(1).tolist() == [58] * 4 and batch.segments.max() == 2


def test_deep_models_and_many_micro_batches_are_on_the_line():
    one = small("dpo")
    deep = one._replace(job=one.job._replace(config=dataclasses.replace(one.job.config, layers=5)))
    methods = supervise.build(deep, single(), lambda _: None)
    exact = dry_supervise.trace(deep, methods, 30, 16, CPU)
    found = dry_supervise.estimate(deep, 30, CPU)
    for phase, costs in exact.phases.items():
        assert found.phases[phase].total == pytest.approx(costs.total, rel=0.1), phase
        assert found.phases[phase].flops == pytest.approx(costs.flops, rel=1e-6), phase


def test_any_mesh_and_a_table_for_each_model(tmp_path):
    model, mesh = write_config(tmp_path, num_hidden_layers=4), "dp4,tp2"
    flags = {"model": model, "mesh": mesh, "dtype": "bfloat16"}
    whole, both, policy = (
        dry_supervise.estimate(course("dpo", H100.memory, **flags, **fsdp), 64, H100).phases
        for fsdp in ({}, {"fsdp": True}, {"fsdp": True, "fsdp_models": "policy"})
    )
    config = course("dpo", model=model).job.config
    share = trees.count(decoder.shapes(config)) / 2  # of a tensor rank, norms apart
    norms = 2 * 64 * config.layers + 64
    for found, reference in ((whole, 1), (both, 4), (policy, 1)):
        trained = 1 if found is whole else 4
        least = 4 * share / trained + 2 * share / reference
        held = found["ref"].peak["weights"]
        assert least <= held + 0.1 * least and (found is both or held <= least + 8 * norms + 2 * share)
    assert policy["ref"].peak["weights"] > both["ref"].peak["weights"]
    gathers = [{op for op, _ in found["ref"].traffic} for found in (whole, both, policy)]
    assert ["all_gather_into_tensor" in ops for ops in gathers] == [False, True, False]
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_command_prints_everything_and_suggests_its_own_flags(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(dry_report.HARDWARE, "cpu", CPU._replace(memory=4e6))
    recipe, model = name, write_config(tmp_path, num_hidden_layers=2, vocab_size=2048)
    flags = [f"--model={model}", "--mesh=dp4", "--batch_prompts=64", "--text_tokens=100", "--dry_run"]
    assert main(name, [name, *flags], recipe) == 0
    said = capsys.readouterr().out
    assert "update_actor" in said and ("\nref " in said) == (name == "dpo") and "fits: " in said
    assert "generate" not in said and "reshard" not in said and "not counted: tokenizer, files" in said
    assert main(name, [name, *flags, "--hardware=cpu"], recipe) == 0
    tried = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  with ")]
    assert tried and set(re.findall(r"--(\w+)", " ".join(tried))) <= {
        name for name, flag in settings_flags().items() if "supervised" in flag.kinds
    }
    assert not (tmp_path / "runs").exists()
    for wrong, why in (
        ("--text_tokens=5000", "--text_tokens=5000 is more than the model's 4096 positions"),
        ("--text_tokens=0", "it must be at least 1"),
        ("--prompt_tokens=8", "--prompt_tokens has no meaning in learning from given texts"),
        ("--fsdp_models=critic", "does nothing without --fsdp; give --fsdp too"),
    ):
        assert main(name, [name, *flags, wrong], recipe) == 2
        assert why in capsys.readouterr().err
    assert main(name, [name, *flags, "--fsdp", "--fsdp_models=critic"], recipe) == 2
    assert "--fsdp_models=critic: this run has no critic; it has " in capsys.readouterr().err
    assert main(name, [name, "--text_tokens=9"], recipe) == 2
    assert "--text_tokens=9 does nothing without --dry_run; give --dry_run too" in capsys.readouterr().err
