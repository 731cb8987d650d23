"""The search over meshes: what is tried, what is chosen, and what a run takes of it."""

import json

import pytest
from dry_jobs import CPU, H100, LLAMA_70B, QWEN3_30B, plain, settings, write_config

from funrl.algos.recipes import recipe
from funrl.cli.command import Experiment, read_command, with_mesh
from funrl.cli.run import main
from funrl.cost import dry_run
from funrl.cost import report as dry_report
from funrl.cost import search as mesh_search
from funrl.cost.report import command_text
from funrl.cost.search import MeshSplit, Space, chosen_mesh, search, split_flags, usable_axes
from funrl.cost.tracing.hardware import USABLE
from funrl.cost.verdict import peak_of
from funrl.mesh.text import MeshError, text, wanted_devices
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import check_values, mesh_sizes, with_flags


def space(world, **given):
    job = plain("grpo")
    return Space(settings(mesh=f"auto:{world}", **given), world, job, ("data", "tensor"), H100, 64, True)


def test_a_split_gives_the_data_axis_what_no_other_one_has():
    of_16 = space(16)
    assert (
        text(of_16.mesh_of(MeshSplit())) == "dp16"
        and text(of_16.mesh_of(MeshSplit(tensor=4, sequence=2))) == "dp2,sp2,tp4"
    )
    assert text(of_16.mesh_of(MeshSplit(tensor=2, sharded=True, grouped=True))) == "dp2,ep4,tp2"
    assert of_16.mesh_of(MeshSplit(tensor=3)) is None
    changed = of_16.settings_of(MeshSplit(tensor=2, sharded=True, engine=4, remat=True, lean=True))
    assert split_flags(changed, of_16.given) == {
        "mesh": "dp8,tp2",
        "generate_mesh": "dp4,tp4",
        "fsdp": True,
        "remat": "full",
        "token_budget": 64,
    }
    grouped = of_16.settings_of(MeshSplit(sharded=True, grouped=True))
    assert split_flags(grouped, of_16.given) == {"mesh": "dp2,ep8", "fsdp": True, "fsdp_axes": "ep"}


def test_experts_are_split_over_ranks_of_an_engine_where_it_is_faster(tmp_path):
    """Weights of 61 GB on devices of 20 GB, where one rank may have a third of 18.4 GB."""
    job = plain("grpo", model=write_config(tmp_path, **QWEN3_30B), batch_prompts=256, max_new_tokens=2048)
    small = H100._replace(memory=20e9)
    given = settings(mesh="auto:64", dtype="bfloat16", batch_prompts=256, max_new_tokens=2048)
    of_64 = Space(given, 64, job, ("data", "tensor", "expert"), small, 2560, True)
    split = of_64._with_engine(MeshSplit())
    assert split.engine_expert > 1 and split.engine <= small.node
    assert of_64.engine_bytes(split) <= small.memory * USABLE / 3
    sizes = of_64.engine_of(split)
    assert sizes["data"] * sizes["expert"] * sizes["tensor"] == 64
    assert of_64.settings_of(split).devices.generate_mesh == text(sizes)
    assert of_64._engine_seconds(split) <= of_64._engine_seconds(split._replace(engine=16, engine_expert=1))


def test_axes_that_the_model_has_nothing_for_are_told(tmp_path):
    models = plain("grpo", model=write_config(tmp_path)).models
    axes, unused = usable_axes(settings(), models)
    assert axes == ("data", "tensor", "expert", "sequence")  # of a dense one, expert makes groups to shard inside of
    assert not unused and not mesh_search.has_experts(models)


def test_what_fits_comes_first_and_tensor_parallel_groups_over_nodes_last():
    slow, spans, large = ((True, 1, 9.0, 0.0), (True, 2, 1.0, 0.0), (False, 1, 1.0, 0.0))  # fits, nodes, seconds
    assert mesh_search.rank_key(*slow) < mesh_search.rank_key(*spans) < mesh_search.rank_key(*large)


@pytest.mark.slow
def test_the_best_is_the_fastest_that_fits(tmp_path):
    model = write_config(tmp_path, num_hidden_layers=1)
    flags, algorithm = settings(mesh="auto:4", model=model, batch_prompts=16), recipe("sft")
    result = search(flags, algorithm(), CPU)
    assert len(result.tried) > 2 and all(traced.fits for traced in result.tried)
    seconds = [traced.seconds for traced in result.tried]
    assert seconds == sorted(seconds)
    chosen, note = chosen_mesh(flags, algorithm, CPU)  # the same again
    assert split_flags(chosen, flags) == result.tried[0].flags and f"--mesh={chosen.devices.mesh}" in note
    assert with_flags(chosen, mesh=flags.devices.mesh, fsdp=False, fsdp_axes=None) == flags
    with pytest.raises(SettingsError, match=r"--mesh=auto:2: no mesh of 2 devices fits: --mesh=.* of 920 kB"):
        chosen_mesh(with_flags(flags, mesh="auto:2"), algorithm, CPU._replace(memory=1e6))


@pytest.mark.slow
def test_a_mesh_of_tpus_is_chosen_for_their_memory_and_dtype(tmp_path):
    model = write_config(tmp_path, num_hidden_layers=1)
    flags = settings(mesh="auto:2", model=model, hardware="v5e", dry_run=True, prompt_tokens=40)
    report = dry_report.dry_run(flags, recipe("grpo"), ["funrl grpo", "--mesh=auto:2", "--hardware=v5e"])
    assert report.startswith("the best of ") and " ways tried to split the run over 2 devices:\n  " in report
    assert "of a device's 14.7 GB" in report and "bfloat16, 2 devices (v5e)" in report


@pytest.mark.slow
def test_a_70b_generates_on_another_mesh_and_computes_layers_again(tmp_path):
    """No device has room for the weights that an engine without tp holds, nor for activations of whole layers.

    Beside the bfloat16 copies of the weights dp64 lacks room for the inputs of layers too, which tp2 halves.
    """
    model = write_config(tmp_path, **LLAMA_70B)
    rows = {"batch_prompts": 128, "samples_per_prompt": 8, "token_budget": 16384, "dtype": "bfloat16"}
    given = settings(mesh="auto:64", model=model, **rows, max_new_tokens=512)
    best = search(given, recipe("grpo")(), H100).tried[0]
    assert best.sensible and best.flags == {
        "mesh": "dp32,tp2",
        "generate_mesh": "dp8,tp8",
        "fsdp": True,
        "remat": "full",
    }


def limited(tmp_path, memory, **given):
    """A search for two devices of so many bytes, of which the default token budget takes much."""
    model = write_config(tmp_path, num_hidden_layers=1)
    flags = {"batch_prompts": 64, "token_budget": 4096, "verify_sync": False, "prompt_tokens": 40}
    flags = settings(mesh="auto:2", model=model, hardware="cpu", dry_run=True, **flags | given)
    return flags, search(flags, recipe("grpo")(), CPU._replace(memory=memory))


@pytest.mark.slow
def test_a_smaller_token_budget_is_tried_if_the_given_one_does_not_fit(tmp_path):
    _, result = limited(tmp_path, 10e6)
    best = result.tried[0]
    assert best.sensible and best.flags["token_budget"] < 4096
    wider = with_flags(best.settings, token_budget=4096)
    needed = dry_run.estimate(dry_run.plain_job(wider, recipe("grpo")(), 10e6), 40, CPU)
    assert peak_of(needed).nbytes > 10e6 * USABLE
    _, result = limited(tmp_path, 1e9)
    assert all("token_budget" not in traced.flags and "remat" not in traced.flags for traced in result.tried)


@pytest.mark.slow
def test_the_command_answers_first_and_lists_what_was_tried(tmp_path, capsys):
    model = write_config(tmp_path, num_hidden_layers=1)
    flags = [f"--model={model}", "--mesh=auto:16", "--text_tokens=64", "--batch_prompts=64", "--dry_run"]
    assert main("sft", ["sft", *flags], "sft") == 0
    report = capsys.readouterr().out
    answer, shown, *_ = report.split("\n\n")
    verdict, command, cost = answer.splitlines()
    assert verdict.startswith("the best of ") and verdict.endswith(" ways tried to split the run over 16 devices:")
    assert command.startswith(f"  sft --model={model} --batch_prompts=64 --mesh=dp") and "dry_run" not in command
    assert " a step, " in cost and cost.endswith(" tokens/s a device") and " for --steps=" in cost
    rows = [line for line in shown.splitlines() if line.startswith("--mesh=")]
    assert main("sft", ["sft", *flags, "--json"], "sft") == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"devices", "best", "traced", "refused", "unused_axes"}
    assert result["best"]["mesh"] == result["traced"][0]["flags"]["mesh"]
    assert len(rows) == min(10, len(result["traced"])) and all(x["sensible"] for x in result["traced"])


def test_a_command_line_keeps_the_flags_that_a_search_does_not_replace():
    line = ["funrl grpo", "--mesh=auto:8", "--dry_run", "--prompts=a b.jsonl", "--hardware=h200", "--remat=none"]
    result = command_text(line, {"mesh": "dp8", "fsdp": True, "remat": "full"})
    assert result == "funrl grpo '--prompts=a b.jsonl' --mesh=dp8 --fsdp --remat=full"
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
