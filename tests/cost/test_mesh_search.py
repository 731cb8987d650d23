"""The search over meshes: what is ranked, what is traced, and what a run takes of it."""

import json

import pytest
from dry_jobs import CPU, H100, LLAMA_70B, QWEN3_30B, plain, settings, write_config

from funrl.algos.recipes import recipe
from funrl.cli.command import Experiment, read_command, with_mesh
from funrl.cli.run import main
from funrl.cost import dry_run
from funrl.cost import report as dry_report
from funrl.cost import search as mesh_search
from funrl.cost import search as split_variants
from funrl.cost.report import command_text
from funrl.cost.search import chosen_mesh, closed_form, factorisations, search, split_flags, usable_axes, ways
from funrl.cost.tracing.hardware import USABLE
from funrl.cost.verdict import peak_of
from funrl.mesh.text import MeshError, wanted_devices
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import check_values, mesh_sizes, with_flags

ALL = ("data", "expert", "tensor")


def written(found):
    return [" ".join(f"{name}={value}" for name, value in split_flags(one, one).items()) for one in found]


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


@pytest.fixture
def traced_once(monkeypatch):
    """Searches of a test trace each split once; the hardware includes its memory."""
    known = {}

    def estimate(job, tokens, hardware):
        key = repr(job.settings), tokens, hardware
        if key not in known:
            known[key] = dry_run.estimate(job, tokens, hardware)
        return known[key]

    monkeypatch.setattr(mesh_search, "estimate", estimate)


def compared(tmp_path, sizes, hardware=H100, **flags):
    """Memory and seconds by formula, in those of the trace, with rows of at most two micro-batches a rank."""
    rows = {"batch_prompts": 8, "samples_per_prompt": 8, "dtype": "bfloat16"}
    job = plain("grpo", hardware.memory, model=write_config(tmp_path, **sizes), **rows | flags)
    found = dry_run.estimate(job, 512, hardware)
    rough = closed_form(job, found.tokens, hardware)
    return rough.nbytes / mesh_search.peak_of(found).nbytes, rough.seconds / mesh_search.rates_of(
        found, hardware
    ).seconds


@pytest.mark.slow
@pytest.mark.parametrize("mesh, fsdp", [("dp2,sp4,tp8", True)])
def test_the_formula_is_near_the_trace_of_a_70b(mesh, fsdp, tmp_path):
    """Memory and time differ by factors of ten from mesh to mesh. Where what a rank keeps between phases leaves no room
    for keys, rows are decoded one by one, by both."""
    nbytes, seconds = compared(tmp_path, LLAMA_70B, mesh=mesh, fsdp=fsdp, token_budget=2048)
    assert 2 / 3 < nbytes < 1.5 and 2 / 3 < seconds < 1.5


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["ep8,tp8"])
def test_the_formula_is_near_the_trace_of_a_model_with_experts(mesh, tmp_path):
    sizes = QWEN3_30B | {"num_hidden_layers": 3}
    nbytes, seconds = compared(tmp_path, sizes, mesh=mesh, fsdp=True, token_budget=4096)
    assert 2 / 3 < nbytes < 1.5 and 2 / 3 < seconds < 1.5


@pytest.mark.slow
@pytest.mark.parametrize("hardware, mesh", [(H100, "dp2,tp2"), (CPU, "dp4")])
def test_the_formula_is_near_the_trace_of_a_small_model(hardware, mesh, tmp_path):
    """Where launches take longest, and where nothing does but arithmetic."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 32000}
    _, seconds = compared(tmp_path, sizes, hardware, mesh=mesh, dtype="float32", token_budget=4096)
    assert 2 / 3 < seconds < 1.5


@pytest.mark.slow
def test_a_model_with_experts_is_split_over_them_too(tmp_path, monkeypatch):
    monkeypatch.setattr(mesh_search, "BEST", 1)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 512, "num_experts": 8, "num_experts_per_tok": 2}
    model = write_config(tmp_path, **QWEN3_30B | sizes | {"num_attention_heads": 4, "moe_intermediate_size": 512})
    found = search(settings(mesh="auto:2", model=model), recipe("grpo")(), CPU)
    tried = [*(one.flags for one in found.best), *(one.flags for one in found.others)]
    assert [one for one in tried if one["mesh"] == "ep2" and "fsdp" not in one] and not found.unused
    whole, split = (closed_form(plain("grpo", model=model, mesh=mesh), 64, CPU) for mesh in ("dp2", "ep2"))
    assert split.nbytes < 0.95 * whole.nbytes  # where every rank has all experts


@pytest.mark.slow
def test_the_best_is_the_fastest_that_fits(tmp_path, monkeypatch, traced_once):
    monkeypatch.setattr(mesh_search, "BEST", 2)
    model = write_config(tmp_path, num_hidden_layers=1)
    flags, algorithm = settings(mesh="auto:4", model=model, batch_prompts=16), recipe("sft")
    found = search(flags, algorithm(), CPU)
    assert len(found.best) == 2 and all(one.fits for one in found.best)
    seconds = [one.rates.seconds for one in found.best]
    assert seconds == sorted(seconds)
    chosen, note = chosen_mesh(flags, algorithm, CPU)  # the same again
    assert split_flags(chosen, flags) == found.best[0].flags and f"--mesh={chosen.devices.mesh}" in note
    assert with_flags(chosen, mesh=flags.devices.mesh, fsdp=False, fsdp_axes=None) == flags
    monkeypatch.setattr(mesh_search, "BEST", 1)
    with pytest.raises(SettingsError, match=r"--mesh=auto:2: no mesh of 2 devices fits: --mesh=.* of 920 kB"):
        chosen_mesh(with_flags(flags, mesh="auto:2"), algorithm, CPU._replace(memory=1e6))


def test_a_mesh_of_tpus_is_chosen_for_their_memory_and_dtype(tmp_path, monkeypatch):
    monkeypatch.setattr(mesh_search, "BEST", 1)
    model = write_config(tmp_path, num_hidden_layers=1)
    flags = settings(mesh="auto:2", model=model, hardware="v5e", dry_run=True, prompt_tokens=40)
    said = dry_report.dry_run(flags, recipe("grpo"), ["funrl grpo", "--mesh=auto:2", "--hardware=v5e"])
    assert said.startswith("the best of 4 ways to split the run over 2 devices:\n  ")
    assert "of a device's 14.7 GB" in said and "bfloat16, 2 devices (v5e)" in said


@pytest.mark.slow
def test_a_70b_generates_on_another_mesh_and_computes_layers_again(tmp_path, monkeypatch):
    """No device has room for the weights that an engine without tp holds, nor for activations of whole layers."""
    monkeypatch.setattr(mesh_search, "BEST", 1)
    model = write_config(tmp_path, **LLAMA_70B)
    rows = {"batch_prompts": 128, "samples_per_prompt": 8, "token_budget": 16384, "dtype": "bfloat16"}
    given = settings(mesh="auto:64", model=model, **rows, max_new_tokens=512)
    best = search(given, recipe("grpo")(), H100).best[0]
    assert best.sensible and best.flags == {
        "mesh": "dp32,tp2",
        "generate_mesh": "dp8,tp8",
        "fsdp": True,
        "remat": "full",
    }
    stays = with_flags(given, generate_mesh="dp16,tp4")
    ranked = mesh_search.ranked_splits(stays, recipe("grpo")(), 64, H100)
    assert {one.settings.devices.generate_mesh for split in ranked.splits for one in split} == {"dp16,tp4"}


def limited(tmp_path, memory, **given):
    """A search for two devices of so many bytes, of which the default token budget takes much."""
    model = write_config(tmp_path, num_hidden_layers=1)
    flags = {"batch_prompts": 64, "token_budget": 4096, "verify_sync": False, "prompt_tokens": 40}
    flags = settings(mesh="auto:2", model=model, hardware="cpu", dry_run=True, **flags | given)
    return flags, search(flags, recipe("grpo")(), CPU._replace(memory=memory))


@pytest.mark.slow
def test_a_smaller_token_budget_is_tried_if_the_given_one_does_not_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(mesh_search, "BEST", 1)
    _, found = limited(tmp_path, 10e6)
    best = found.best[0]
    assert best.sensible and best.flags["token_budget"] < 4096
    wider = with_flags(best.settings, token_budget=4096)
    needed = dry_run.estimate(dry_run.plain_job(wider, recipe("grpo")(), 10e6), 40, CPU)
    assert peak_of(needed).nbytes > 10e6 * USABLE
    _, found = limited(tmp_path, 1e9)
    assert all("token_budget" not in one.flags and "remat" not in one.flags for one in found.best)


@pytest.mark.slow
def test_tensor_parallel_groups_over_nodes_come_last_and_are_named(tmp_path, monkeypatch, traced_once):
    monkeypatch.setattr(split_variants, "RANKS_PER_NODE", 1)  # so that tp2 spans two
    with monkeypatch.context() as patch:
        patch.setattr(mesh_search, "BEST", 1)
        _, found = limited(tmp_path, 1e9)
    assert found.best[0].sensible and found.best[0].nodes == 1
    assert any("tp over 2 nodes" in one.reason for one in found.others)
    slow, spans, large = ((True, 1, 9.0, 0.0), (True, 2, 1.0, 0.0), (False, 1, 1.0, 0.0))  # fits, nodes, seconds
    assert split_variants.rank_key(*slow) < split_variants.rank_key(*spans) < split_variants.rank_key(*large)
    flags, found = limited(tmp_path, 10.2e6)
    best = found.best[0]
    assert best.fits and not best.sensible and best.nodes == 2
    chosen, note = chosen_mesh(flags, recipe("grpo"), CPU._replace(memory=10.2e6))
    assert chosen == best.settings and "tp over 2 nodes, as nothing else fits" in note
    monkeypatch.setitem(dry_report.HARDWARE, "cpu", CPU._replace(memory=10.2e6))
    said = dry_report.dry_run(flags, recipe("grpo"), ["funrl grpo", "--mesh=auto:2"])
    assert said.startswith("nothing sensible fits 2 devices; ") and "not sensible: tp over 2 nodes" in said


@pytest.mark.slow
def test_the_command_answers_first_and_says_why_the_others_fall_out(tmp_path, capsys, traced_once):
    model = write_config(tmp_path, num_hidden_layers=1)
    flags = [f"--model={model}", "--mesh=auto:16", "--text_tokens=64", "--batch_prompts=64", "--dry_run"]
    assert main("sft", ["sft", *flags], "sft") == 0
    said = capsys.readouterr().out
    answer, shown, *_ = said.split("\n\n")
    verdict, command, cost = answer.splitlines()
    assert verdict == "the best of 28 ways to split the run over 16 devices:"
    assert command.startswith(f"  sft --model={model} --batch_prompts=64 --mesh=dp") and "dry_run" not in command
    assert " a step, " in cost and cost.endswith(" tokens/s a device") and " for --steps=" in cost
    rows = [line for line in shown.splitlines() if line.startswith("--mesh=")]
    assert len(rows) == 10 and sum("traced, largest in" in row for row in rows) == 5
    assert "and 18 more, which --json lists: " in shown and "does not divide over tp16" in shown
    assert main("sft", ["sft", *flags, "--json"], "sft") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"devices", "best", "traced", "not_traced", "unused_axes"}
    assert found["best"]["mesh"] == found["traced"][0]["flags"]["mesh"] and len(found["not_traced"]) == 23
    assert len(found["traced"]) == 5 and all(one["sensible"] for one in found["traced"])
    assert all(one["seconds"] for one in found["traced"]) and all(one["reason"] for one in found["not_traced"])


def test_a_command_line_keeps_the_flags_that_a_search_does_not_replace():
    line = ["funrl grpo", "--mesh=auto:8", "--dry_run", "--prompts=a b.jsonl", "--hardware=h200", "--remat=none"]
    found = command_text(line, {"mesh": "dp8", "fsdp": True, "remat": "full"})
    assert found == "funrl grpo '--prompts=a b.jsonl' --mesh=dp8 --fsdp --remat=full"
    assert command_text([], {"mesh": "dp8"}) == "--mesh=dp8"


@pytest.mark.slow
def test_a_run_takes_the_best_mesh():
    argv = ["funrl sft", "--mesh=auto:2", "--device=cpu", "--batch_prompts=8"]
    command = read_command(Experiment("sft", "sft", {}), argv, writes=False)
    assert mesh_sizes(command.settings)["data"] == 2
    chosen = with_mesh(command)
    assert chosen.settings.devices.mesh == "dp2" and "--mesh=auto:2 is --mesh=dp2" in chosen.notes[-1]
    assert with_mesh(chosen) is chosen


@pytest.mark.parametrize("text", ["auto", "auto:", "auto:0", "auto:x", "auto8"])
def test_auto_has_a_number_of_devices(text):
    with pytest.raises(MeshError, match=f"--mesh={text}: write auto and the number of devices, such as auto:8"):
        wanted_devices(text)
    with pytest.raises(SettingsError, match="write auto"):
        check_values(settings(mesh=text))
