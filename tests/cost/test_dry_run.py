"""The dry run against runs that compute, and against closed forms."""

import dataclasses
import json

import pytest
import torch

from funrl import trees
from funrl.cost import dry_run
from funrl.cost.costs import Costs, Tracer, Traffic, after, along, plus, times
from funrl.cost.dry_report import verdict
from funrl.cost.estimate import Estimate, at_rows
from funrl.cost.hardware import HARDWARE, collective_seconds, op_seconds
from funrl.experiments import grpo, ppo, remax
from funrl.experiments.run import main
from funrl.mesh.mesh import single
from funrl.models import decoder, value
from funrl.models.config import ModelError
from funrl.trainer import ensemble
from funrl.trainer.settings import Settings

H100 = HARDWARE["h100"]
CPU = HARDWARE["cpu"]


def settings(**given):
    return Settings(**{"batch_prompts": 8, "samples_per_prompt": 2, "max_new_tokens": 24, "token_budget": 256} | given)


def small(compose=ppo.algorithm, layers=3, **given):
    job = dry_run.plain_job(settings(**given), compose, CPU.memory)
    sizes = {"embed": 32, "layers": layers, "heads": 4, "kv_heads": 2, "head": 8, "mlp": 96, "vocab": 300}
    return job._replace(config=dataclasses.replace(job.config, **sizes))


def write_config(folder, **changes):
    raw = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 128, "vocab_size": 512,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    path = folder / "config.json"
    path.write_text(json.dumps(raw | changes))
    return str(path)


@pytest.mark.parametrize(
    "compose, given",
    [(ppo.algorithm, {}), (grpo.algorithm, {"token_budget": 4096}), (grpo.algorithm, {"remat": "full"})],
)
def test_the_pretended_step_holds_what_the_real_one_holds(compose, given):
    job = small(compose, layers=2, **given)
    models = ensemble.build(job, single(), lambda _: None)
    fake = dry_run.trace(job, models, 8, 16, CPU)
    real = dry_run.trace(job, models, 8, 16, CPU, real=True)
    assert set(fake.phases) == set(real.phases)
    for name, costs in real.phases.items():
        assert fake.phases[name].total == pytest.approx(costs.total, rel=0.1), name
        assert fake.phases[name].flops == pytest.approx(costs.flops), name
    assert fake.resting == real.resting


def test_many_micro_batches_are_on_the_line():
    rows, budget = 32, 256
    job = small(grpo.algorithm, layers=1, token_budget=budget)
    models = ensemble.build(job, single(), lambda _: None)
    whole = dry_run.trace(job, models, 8, rows, CPU)
    line = at_rows(lambda n: dry_run.trace(job, models, 8, n, CPU), rows, budget // 32, 1)
    for name, costs in whole.phases.items():
        assert line[name].total == pytest.approx(costs.total, rel=0.1), name
        assert line[name].flops == pytest.approx(costs.flops, rel=1e-6), name


def test_deep_models_are_on_the_line():
    job = small(grpo.algorithm, layers=5)
    shallow = dry_run.estimate(job, 8, CPU)
    exact = dry_run._phases(job, single(), 8, CPU)
    for name, costs in exact.items():
        if name != "rests":
            assert shallow.phases[name].total == pytest.approx(costs.total, rel=0.1), name
            assert shallow.phases[name].flops == pytest.approx(costs.flops, rel=1e-6), name


def test_states_and_cache_have_their_closed_forms():
    job = small(samples_per_prompt=2, max_new_tokens=24)
    found = dry_run.estimate(job, 8, CPU)
    config, world = job.config, 4 * trees.count(decoder.shapes(job.config))
    critic = world + 4 * config.embed - (0 if config.tied else 4 * config.vocab * config.embed)
    assert found.phases["generate"].peak["weights"] == world * 2 + critic  # policy, reference, critic
    assert found.phases["generate"].peak["optimizer"] == pytest.approx(2 * (world + critic), rel=1e-3)
    rows, length = 16, 32
    cache = decoder.init_cache(config, single(), rows, length, job.dtype)
    assert found.phases["generate"].peak["cache"] == trees.nbytes(cache)


def test_the_reference_has_its_own_table_and_dtype(tmp_path):
    model = write_config(tmp_path)
    flags = {"model": model, "dtype": "bfloat16", "mesh": "dp4", "batch_prompts": 16, "fsdp": True}
    both, policy = (
        dry_run.estimate(dry_run.plain_job(settings(**flags, **more), grpo.algorithm, 1e9), 8, CPU).phases
        for more in ({}, {"fsdp_models": "policy"})
    )
    config = dry_run.plain_job(settings(model=model), grpo.algorithm, 1e9).config
    split = trees.count(decoder.shapes(config)) - 64 * (2 * config.layers + 1)  # all but norms
    difference = policy["generate"].peak["weights"] - both["generate"].peak["weights"]
    assert difference == pytest.approx(2 * split * 3 / 4)  # bytes that three other ranks held


def test_what_is_offloaded_is_away_where_it_is_not_needed():
    job = small(minibatches=1)
    here, away = (
        dry_run.estimate(job._replace(settings=dataclasses.replace(job.settings, offload=parts)), 8, H100).phases
        for parts in (None, "optimizer,reference,params")
    )
    policy = 4 * trees.count(decoder.shapes(job.config))
    critic = 4 * trees.count(value.shapes(job.config))
    without = {name: {k: here[name].peak[k] - away[name].peak[k] for k in ("weights", "optimizer")} for name in here}
    moments = pytest.approx(2 * (policy + critic), rel=1e-3)
    assert without["generate"] == {"weights": policy + critic, "optimizer": moments}  # the engine has the policy's own
    for name in ("old_logp", "ref", "value", "advantage"):
        assert without[name] == {"weights": 0, "optimizer": moments}
    for name in ("update_critic", "update_actor", "reshard"):
        assert without[name] == {"weights": policy, "optimizer": 0}
    on_cpu = dry_run.estimate(job._replace(settings=dataclasses.replace(job.settings, offload="optimizer")), 8, CPU)
    assert on_cpu.left_out[-1] == "--offload=optimizer: it does nothing on a CPU"


def test_remax_generates_greedily_too():
    with_greedy, without = (
        dry_run.estimate(small(compose, layers=1), 8, CPU).phases["generate"]
        for compose in (remax.algorithm, grpo.algorithm)
    )
    # One more completion a prompt: 3 of them instead of 2, and the prompt is read once more.
    assert 1.4 < with_greedy.flops / without.flops < 2
    assert with_greedy.seconds > 1.4 * without.seconds


def test_what_is_left_out_is_said(capsys):
    flags = ["--dry_run", "--batch_prompts=4", "--samples_per_prompt=2", "--offload=optimizer", "--eval_every=7"]
    assert main("dapo", ["dapo", *flags]) == 0
    said = capsys.readouterr().out
    for words in ("rewards, tokenizer, files", "evaluation every 7 steps", "7 more batches", "the time of its copies"):
        assert words in said.split("not counted: ")[1]


def test_flops_of_training_are_three_times_those_of_scoring():
    found = dry_run.estimate(small(minibatches=1, token_budget=4096), 8, CPU).phases
    assert found["update_critic"].flops == pytest.approx(3 * found["value"].flops, rel=0.05)
    assert found["update_actor"].flops == pytest.approx(3 * found["old_logp"].flops, rel=0.25)  # logits once more


def test_tensor_ranks_hold_a_share_and_talk(tmp_path):
    model = write_config(tmp_path)
    one, two = (
        dry_run.estimate(
            dry_run.plain_job(settings(model=model, mesh=mesh, generate_mesh=mesh), ppo.algorithm, CPU.memory), 8, CPU
        )
        for mesh in ("dp2", "dp2,tp2")
    )
    assert two.phases["update_actor"].peak["weights"] < 0.6 * one.phases["update_actor"].peak["weights"]
    group = {text: name for name, (text, *_) in two.axes.items()}
    assert {group["dp2"], group["tp2"]} <= {name for _, name in two.phases["update_actor"].traffic}
    # of one micro-batch: the embedding, 2 a layer, and the maximum and the sums of the logits
    assert two.phases["old_logp"].traffic["all_reduce", group["tp2"]].count == 1 + 2 * 2 + 2


@pytest.mark.parametrize("given", [{"mesh": "dp64,tp8", "batch_prompts": 128, "samples_per_prompt": 1}])
def test_512_ranks_and_sharding_over_data(tmp_path, given):
    model = write_config(tmp_path)
    whole, sharded = (
        dry_run.estimate(
            dry_run.plain_job(settings(model=model, fsdp=fsdp, **given), ppo.algorithm, H100.memory), 8, H100
        )
        for fsdp in (False, True)
    )
    assert sharded.phases["reshard"].peak["optimizer"] < 0.1 * whole.phases["reshard"].peak["optimizer"]
    operations = {op for op, _ in sharded.phases["update_actor"].traffic}
    assert {"all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"} <= operations
    assert not torch.distributed.is_initialized()


def test_the_tracer_counts_what_lives():
    tracer = Tracer(CPU)
    with tracer, tracer.phase("all"):
        x = torch.zeros(1000)
        y = x + 1
        del y
        z = x * 2
        w = z.view(10, 100) @ z.view(100, 10)
        del x, z
    costs = tracer.phases["all"]
    assert costs.total == 4 * 2100 and costs.flops == 2 * 10 * 100 * 10
    assert tracer.sum == w.numel() * 4


def test_masks_that_are_not_known_are_true_everywhere():
    tracer = Tracer(CPU)
    with tracer:
        x = torch.randn(4, 6)
        assert x[torch.arange(24).view(4, 6) % 2 == 0].shape == (12,)
        assert x[x > 0].shape == (24,)
        assert torch.randperm(5, generator=torch.Generator().manual_seed(0)).sum().item() == 10
        with pytest.raises(RuntimeError, match="whole number"):
            x.argmax().item()


def test_sums_of_costs():
    a = Costs({"other": {"weights": 10.0}}, 1.0, 2.0, {("all_reduce", "g"): Traffic(1, 8)})
    b = Costs({"other": {"weights": 14.0, "batch": 2.0}, "forward": {"weights": 1.0}}, 2.0, 2.5)
    assert along(a, b, 3).peak == {"weights": 22.0, "batch": 6.0}
    assert along(a, b, 3).flops == 4.0
    assert times(a, 3).traffic["all_reduce", "g"] == (3, 24) and times(a, 3).total == 10
    assert after(a, b).total == 16 and after(a, b).seconds == 4.5
    assert plus(a, {"batch": 5}).total == 15


def test_time_is_bound_by_the_slowest():
    flops, nbytes = 1e15, 1e6
    assert op_seconds(H100, flops, nbytes, torch.bfloat16) == pytest.approx(1e15 / 989e12 / 0.5)
    assert op_seconds(H100, 0, 3.35e12, torch.bfloat16) == pytest.approx(1 / 0.7)
    assert op_seconds(H100, 0, 8, torch.bfloat16) == H100.launch
    ring = collective_seconds(H100, "all_reduce", 0, 450e9, 2, near=True)
    assert ring == pytest.approx(2 * 0.5 / 0.7)


def test_a_configuration_is_enough_and_must_be_there(tmp_path):
    path = write_config(tmp_path)
    for model in (path, str(tmp_path)):
        assert dry_run.plain_job(settings(model=model), ppo.algorithm, 1e9).config.embed == 64
    with pytest.raises(ModelError, match=r"nowhere.*config\.json and nothing else"):
        dry_run.plain_job(settings(model=str(tmp_path / "nowhere")), ppo.algorithm, 1e9)


def test_the_command_prints_everything_and_starts_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = write_config(tmp_path, num_hidden_layers=1)
    flags = [f"--model={model}", "--mesh=dp2,tp2", "--batch_prompts=4", "--samples_per_prompt=2", "--max_new_tokens=8"]
    assert main("grpo", ["grpo", *flags, "--prompt_tokens=8", "--dry_run"]) == 0
    said = capsys.readouterr().out
    for word in (
        "peak memory of a rank",
        "update_actor",
        "optimizer",
        "all_reduce",
        "fits: the most that a rank holds",
    ):
        assert word in said
    assert not (tmp_path / "runs").exists()
    for wrong, why in (("--hardware=tpu", "it must be one of a100"), ("--prompt_tokens=5000", "4096 positions")):
        assert main("grpo", ["grpo", *flags, "--dry_run", wrong]) == 2
        assert why in capsys.readouterr().err
    assert main("grpo", ["grpo", *flags, "--hardware=h200"]) == 2
    assert "give --dry_run too" in capsys.readouterr().err


def test_what_does_not_fit_is_said_with_the_flag_that_helps(tmp_path):
    job = small(grpo.algorithm, layers=1)
    state = {"weights": 60e9, "optimizer": 40e9, "activations": 2e9}
    job = job._replace(sizes=job.sizes | {"data": 4})
    found = Estimate(job, ("policy",), "of a test", 32, {"update_actor": Costs({"other": state})}, {}, 1, ())
    helped = found._replace(phases={"update_actor": Costs({"other": {"weights": 20e9}})})
    tried = []

    def costs(changed):
        tried.append(changed)
        return helped

    said = verdict(found, settings(mesh="dp4"), H100, costs)
    assert "does not fit: a rank needs 102 GB" in said and "with --fsdp: 20 GB, in update_actor (fits)" in said
    assert len(tried) == 1 and tried[0].fsdp
    assert verdict(helped, settings(), H100, costs).startswith("fits: ")
