"""The search over meshes: what is ranked, what is traced, and what a run takes of it."""

import dataclasses
import json

import pytest
from dry_jobs import CPU, H100, LLAMA_70B, QWEN3_30B, plain, settings, write_config

from funrl.algos.recipes import recipe
from funrl.cost import dry_run, mesh_search
from funrl.cost.closed_form import closed_form
from funrl.cost.mesh_search import chosen_mesh, factorisations, search, split_flags, usable_axes, ways
from funrl.experiments.command import Experiment, read_command, with_mesh
from funrl.experiments.run import main
from funrl.mesh.text import MeshError, wanted_devices
from funrl.trainer.declaration import SettingsError
from funrl.trainer.settings import check_values, mesh_sizes

ALL = ("data", "expert", "tensor")


def written(found):
    return [" ".join(f"{name}={value}" for name, value in split_flags(one).items()) for one in found]


def test_every_way_to_split_is_there_once():
    assert sorted(factorisations(4, 2)) == [(1, 4), (2, 2), (4, 1)]
    assert len(set(factorisations(64, 3))) == len(list(factorisations(64, 3))) == 28
    found = written(ways(settings(), 4, ALL, experts=False))
    assert found == ["mesh=tp4", "mesh=dp2,tp2", "mesh=dp2,tp2 fsdp=True", "mesh=dp4", "mesh=dp4 fsdp=True"]
    groups = [one for one in written(ways(settings(), 16, ALL, False)) if "fsdp_axes" in one]
    assert groups == [f"mesh=dp2,{rest} fsdp=True fsdp_axes=ep" for rest in ("ep2,tp4", "ep4,tp2", "ep8")]
    given = written(ways(settings(fsdp=True, fsdp_axes="dp"), 4, ("data", "tensor"), experts=False))
    assert given == [f"mesh={mesh} fsdp=True fsdp_axes=dp" for mesh in ("tp4", "dp2,tp2", "dp4")]
    assert "mesh=ep4" in written(ways(settings(), 4, ALL, experts=True))


def test_axes_that_the_model_has_nothing_for_are_told(tmp_path):
    models = plain("grpo", model=write_config(tmp_path)).models
    axes, unused = usable_axes(settings(), models)
    assert axes == ("data", "tensor", "expert", "sequence")  # of a dense one, expert makes groups to shard inside of
    assert not unused and not mesh_search.has_experts(models)


def compared(tmp_path, sizes, hardware=H100, **flags):
    """Memory and seconds by formula, in those of the trace."""
    rows = {"batch_prompts": 64, "samples_per_prompt": 8, "dtype": "bfloat16"}
    job = plain("grpo", hardware.memory, model=write_config(tmp_path, **sizes), **rows | flags)
    found = dry_run.estimate(job, 512, hardware)
    rough = closed_form(job, found.tokens, hardware)
    return rough.nbytes / mesh_search.peak_of(found).nbytes, rough.seconds / mesh_search.rates_of(
        found, hardware
    ).seconds


@pytest.mark.slow
@pytest.mark.parametrize("mesh, fsdp", [("dp8,tp8", False), ("dp8,tp8", True), ("dp64", True), ("dp16,tp4", True)])
def test_the_formula_is_near_the_trace_of_a_70b(mesh, fsdp, tmp_path):
    """Memory and time differ by factors of ten from mesh to mesh. Where what a rank keeps between phases leaves no room
    for keys, rows are decoded one by one, by both."""
    nbytes, seconds = compared(tmp_path, LLAMA_70B, mesh=mesh, fsdp=fsdp, token_budget=2048)
    assert 2 / 3 < nbytes < 1.5 and 2 / 3 < seconds < 1.5


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp8,ep8", "ep8,tp8", "dp64"])
def test_the_formula_is_near_the_trace_of_a_model_with_experts(mesh, tmp_path):
    nbytes, seconds = compared(tmp_path, QWEN3_30B, mesh=mesh, fsdp=True, token_budget=4096)
    assert 2 / 3 < nbytes < 1.5 and 2 / 3 < seconds < 1.5


@pytest.mark.parametrize("hardware, mesh", [(H100, "dp2,tp2"), (CPU, "dp4")])
def test_the_formula_is_near_the_trace_of_a_small_model(hardware, mesh, tmp_path):
    """Where launches take longest, and where nothing does but arithmetic."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 32000}
    _, seconds = compared(tmp_path, sizes, hardware, mesh=mesh, batch_prompts=16, dtype="float32", token_budget=4096)
    assert 2 / 3 < seconds < 1.5


def test_a_model_with_experts_is_split_over_them_too(tmp_path, monkeypatch):
    monkeypatch.setattr(mesh_search, "BEST", 1)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 512, "num_experts": 8, "num_experts_per_tok": 2}
    model = write_config(tmp_path, **QWEN3_30B | sizes | {"num_attention_heads": 4, "moe_intermediate_size": 512})
    found = search(settings(mesh="auto:2", model=model), recipe("grpo")(), CPU)
    tried = [*(one.flags for one in found.best), *(one.flags for one in found.others)]
    assert [one for one in tried if one["mesh"] == "ep2" and "fsdp" not in one] and not found.unused
    whole, split = (closed_form(plain("grpo", model=model, mesh=mesh), 64, CPU) for mesh in ("dp2", "ep2"))
    assert split.nbytes < 0.95 * whole.nbytes  # where every rank has all experts


def test_the_best_is_the_fastest_that_fits(tmp_path, monkeypatch):
    monkeypatch.setattr(mesh_search, "BEST", 2)
    model = write_config(tmp_path, num_hidden_layers=1)
    flags, algorithm = settings(mesh="auto:4", model=model, batch_prompts=16), recipe("grpo")
    found = search(flags, algorithm(), CPU)
    assert len(found.best) == 2 and all(one.fits for one in found.best)
    seconds = [one.rates.seconds for one in found.best]
    assert seconds == sorted(seconds)
    chosen, note = chosen_mesh(flags, algorithm, CPU)  # the same again
    assert split_flags(chosen) == found.best[0].flags and f"--mesh={chosen.mesh}" in note
    assert dataclasses.replace(chosen, mesh=flags.mesh, fsdp=False, fsdp_axes=None) == flags
    monkeypatch.setattr(mesh_search, "BEST", 1)
    with pytest.raises(SettingsError, match=r"--mesh=auto:2: no mesh of 2 devices fits: --mesh=.* of 0\.00092 GB"):
        chosen_mesh(dataclasses.replace(flags, mesh="auto:2"), algorithm, CPU._replace(memory=1e6))


def test_the_command_prints_what_was_traced_and_why_the_others_fall_out(tmp_path, capsys):
    model = write_config(tmp_path, num_hidden_layers=1)
    flags = [f"--model={model}", "--mesh=auto:16", "--text_tokens=64", "--batch_prompts=64", "--dry_run"]
    assert main("sft", ["sft", *flags], "sft") == 0
    said = capsys.readouterr().out
    assert "can be split in 28 ways; the best 5 by formula, traced" in said
    assert "heads has size 8, which does not divide over tp16" in said and "\nthe best: --mesh=dp" in said
    assert main("sft", ["sft", *flags, "--json"], "sft") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"devices", "best", "traced", "not_traced", "unused_axes"} and len(found["traced"]) == 5
    assert found["best"]["mesh"] == found["traced"][0]["flags"]["mesh"] and len(found["not_traced"]) == 23
    assert all(one["seconds"] for one in found["traced"]) and all(one["reason"] for one in found["not_traced"])


def test_a_run_takes_the_best_mesh():
    argv = ["funrl sft", "--mesh=auto:2", "--device=cpu", "--batch_prompts=8"]
    command = read_command(Experiment("sft", "sft", {}), argv, writes=False)
    assert mesh_sizes(command.settings)["data"] == 2
    chosen = with_mesh(command)
    assert chosen.settings.mesh == "dp2" and "--mesh=auto:2 is --mesh=dp2" in chosen.notes[-1]
    assert with_mesh(chosen) is chosen


@pytest.mark.parametrize("text", ["auto", "auto:", "auto:0", "auto:x", "auto8"])
def test_auto_has_a_number_of_devices(text):
    with pytest.raises(MeshError, match=f"--mesh={text}: write auto and the number of devices, such as auto:8"):
        wanted_devices(text)
    with pytest.raises(SettingsError, match="write auto"):
        check_values(settings(mesh=text))
