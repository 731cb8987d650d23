"""`--model=ADAPTER` and `--adapter`: a run continues adapters on their base, or says what to give."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

import funrl
from funrl.cli import main as cli
from funrl.tasks import arithmetic
from funrl.trainer.settings.declaration import SettingsError

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
RUN = {
    "batch_prompts": 2,
    "samples_per_prompt": 2,
    "max_new_tokens": 3,
    "eval_prompts": 2,
    "device": "cpu",
    "prompts": [{"prompt": f"{i}+{i + 3}="} for i in range(4)],
}
KEEPS = RUN | {"kl_coef": 0.0}  # with equal rewards, no step moves a weight
NAME = "adapter/adapter_model.safetensors"


def ones(prompt, completion):
    return completion.count("1") / 3


def same(prompt, completion):
    return 1.0


def digits(prompt, completion):
    return sum(map(completion.count, "12345")) / 3


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A base, and a run that has learned adapters on it."""
    folder = tmp_path_factory.mktemp("first")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("llama", vocab_size=len(arithmetic.tokenizer()), **SIZES)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    arithmetic.tokenizer().save_pretrained(folder / "base")
    flags = {"lora_rank": 3, "lora_alpha": 7.0, "lora_targets": "q_proj,v_proj,down_proj", "lr": 0.1, "steps": 2}
    funrl.train("grpo", model=str(folder / "base"), reward=digits, run_dir=str(folder / "run"), **RUN | flags)
    assert any(x.any() for name, x in load_file(folder / "run" / NAME).items() if "lora_B" in name)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp1", pytest.param("tp2", marks=pytest.mark.gloo)])
def test_a_run_goes_on_with_an_adapter(mesh, first, tmp_path):
    given = str(first / "run" / "adapter")
    run = funrl.train("grpo", model=given, reward=same, run_dir=str(tmp_path / "run"), steps=1, mesh=mesh, **KEEPS)
    for name in (NAME, "model/model.safetensors"):
        before, after = load_file(first / "run" / name), load_file(tmp_path / "run" / name)
        assert before.keys() == after.keys()
        assert all((after[key] - x).abs().max() < 1e-6 for key, x in before.items())
    assert run.metrics[0]["rollout/logprob_gap_max"] < 1e-5  # the engine has them from the first prompt on
    config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 7.0) and config["base_model_name_or_path"] == str(first / "base")
    flags = json.loads((tmp_path / "run" / "config.json").read_text())["flags"]
    assert (flags["model"], flags["adapter"], flags["lora_rank"]) == (str(first / "base"), given, 3)
    assert run.model.generate(["1+4="], max_new_tokens=3)  # of the merged model


@pytest.mark.slow
def test_a_run_on_an_adapter_is_resumed_with_the_same_bits(first, tmp_path):
    given = {"model": str(first / "run" / "adapter"), "reward": digits, "lr": 0.1, "save_every": 1, **RUN}
    funrl.train("grpo", run_dir=str(tmp_path / "whole"), steps=3, **given)
    funrl.train("grpo", run_dir=str(tmp_path / "parts"), steps=2, **given)
    funrl.train("grpo", run_dir=str(tmp_path / "parts"), steps=3, resume=True, **given)
    whole, parts = (load_file(tmp_path / name / NAME) for name in ("whole", "parts"))
    start = load_file(first / "run" / NAME)
    assert all(torch.equal(x, parts[name]) for name, x in whole.items())
    assert not all(torch.equal(x, start[name]) for name, x in whole.items())


def test_what_cannot_go_on_is_refused_before_work(first, tmp_path):
    shutil.copytree(first / "run" / "adapter", tmp_path / "moved")
    file = tmp_path / "moved" / "adapter_config.json"
    raw = json.loads(file.read_text())
    adapter, merge = str(first / "run" / "adapter"), "merge it with peft's merge_and_unload"
    base, moved = str(first / "base"), str(tmp_path / "moved")

    def refused(says, base_named=base, **flags):
        file.write_text(json.dumps(raw | {"base_model_name_or_path": base_named}))
        with pytest.raises(SettingsError, match=says):
            funrl.train("grpo", reward=ones, run_dir=str(tmp_path / "run"), steps=1, **RUN | flags)
        assert not (tmp_path / "run").exists()

    elsewhere = f"for the base org/none, which is neither .* give --model=BASE --adapter={moved}, or {merge}"
    refused(elsewhere, "org/none", model=moved)
    refused("which is not named in base_model_name_or_path; give --model=BASE", None, model=moved)
    refused("which is adapters too", adapter, model=moved)
    refused("--lora_rank=4: the adapters in .* have 3; leave it out", model=adapter, lora_rank=4)
    refused("--lora_targets=q_proj: .* have down_proj,q_proj,v_proj", model=adapter, lora_targets="q_proj")
    refused("is an adapter too; give its base", model=adapter, adapter=adapter)
    refused("--optimizer=muon with --lora_rank=3", model=adapter, optimizer="muon")
    refused(f"--reward_model.*holds adapters alone, for the base {base}; {merge}", model=base, reward_model=adapter)
    refused("adapter_config.json is missing", model=base, adapter=base)
    refused("has shape .*, the model needs", model=_wider(tmp_path), adapter=adapter)


def _wider(tmp_path):
    """A base with other sizes than that of the adapters."""
    config = transformers.AutoConfig.for_model("llama", vocab_size=16, **SIZES | {"hidden_size": 20})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "wider")
    arithmetic.tokenizer().save_pretrained(tmp_path / "wider")
    return str(tmp_path / "wider")


def test_commands_that_take_a_model_say_what_to_merge(first, capsys):
    assert cli.main(["funrl", "evaluate", str(first / "run" / "adapter")]) != 0
    errors = capsys.readouterr().err
    assert f"for the base {first / 'base'}; give the directory of their run, or its model/, or merge it" in errors
