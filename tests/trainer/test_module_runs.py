"""Runs over transformers' own code: GPT-2 and GPT-NeoX learn, data parallel and fully sharded, and are saved."""

import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import funrl
from funrl.algos.recipes import recipe
from funrl.cost.dry_run import estimate, plain_job
from funrl.cost.tracing.hardware import HARDWARE
from funrl.mesh.mesh import MeshError
from funrl.tasks import arithmetic
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import settings_of

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "bos_token_id": 1, "eos_token_id": 1}
MODELS = {
    "gpt2": SIZES | {"n_positions": 32},
    "gpt_neox": SIZES | {"intermediate_size": 32, "max_position_embeddings": 32},
    "apertus": SIZES | {"intermediate_size": 32, "max_position_embeddings": 32},
}
PROMPTS = [{"prompt": f"{i}+{i + 3}="} for i in range(4)]
RUN = {
    "engine": "hf",
    "dtype": "float32",
    "steps": 2,
    "batch_prompts": 4,
    "samples_per_prompt": 2,
    "max_new_tokens": 4,
    "eval_prompts": 2,
    "lr": 1e-2,
    "queue": "fixed",
    "device": "cpu",
    "prompts": PROMPTS,
}


def digits(prompt, completion):
    return sum(map(completion.count, "12345")) / 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A random model of each kind with the tokenizer of the embedded task."""
    tokenizer, results = arithmetic.tokenizer(), {}
    for name, sizes in MODELS.items():
        torch.manual_seed(0)
        results[name] = str(tmp_path_factory.mktemp(name))
        config = transformers.AutoConfig.for_model(name, vocab_size=len(tokenizer), **sizes)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(results[name])
        tokenizer.save_pretrained(results[name])
    return results


def _saved(run):
    return load_file(f"{run.run_dir}/model/model.safetensors")


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_two_steps_of_ppo_on_two_ranks(name, folders, tmp_path):
    kinds = {"fsdp": {"mesh": "dp2", "fsdp": True, "remat": "full", "steps": 1 + (name == "gpt2")}}
    kinds |= {"dp2": {"mesh": "dp2", "steps": 1}} if name == "gpt_neox" else {}
    runs = {
        key: funrl.train("ppo", model=folders[name], reward=digits, run_dir=str(tmp_path / key), **RUN | more)
        for key, more in kinds.items()
    }
    for kind, run in runs.items():
        assert len(run.metrics) == kinds[kind]["steps"]
        for reported in run.metrics:
            assert reported["rollout/logprob_gap_max"] < 1e-5
            assert math.isfinite(reported["actor/pg_loss"])
            assert reported["actor/grad_norm"] > 0 and reported["critic/grad_norm"] > 0
        peer = transformers.AutoModelForCausalLM.from_pretrained(f"{run.run_dir}/model").eval()
        raw = json.loads(Path(f"{run.run_dir}/model/config.json").read_text())
        assert raw["architectures"] == [type(peer).__name__]
        held, before = peer.state_dict(), load_file(f"{folders[name]}/model.safetensors")
        for key, x in _saved(run).items():
            assert torch.equal(held[key], x.to(held[key].dtype)), key
        changed = [key for key, x in _saved(run).items() if key in before and not torch.equal(x.float(), before[key])]
        assert len(changed) > 20
        made = funrl.generate(f"{run.run_dir}/model", ["1+4="], max_new_tokens=3)
        assert made == run.model.generate(["1+4="], max_new_tokens=3)
    if "dp2" in runs:  # the same rows on the same ranks
        whole, sharded = (runs[key].metrics[0] for key in ("dp2", "fsdp"))
        for key in ("actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm"):
            assert sharded[key] == pytest.approx(whole[key], rel=1e-4, abs=1e-6), key


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("freeze", [None, "unembed", "none"])
def test_buffers_of_a_module_are_saved_as_they_were(freeze, folders, tmp_path):
    """Apertus has gradients at constants of its activation."""
    more = {"mesh": "dp2", "fsdp": True, "steps": 1, "weight_decay": 0.1, "decay_all": True, "save_every": 1}
    more |= {"freeze": freeze}
    run = funrl.train("grpo", model=folders["apertus"], reward=digits, run_dir=str(tmp_path), **RUN | more)
    before, after = load_file(f"{folders['apertus']}/model.safetensors"), _saved(run)
    assert run.metrics[0]["actor/grad_norm"] > 0 and before.keys() == after.keys()
    kept = {name for name, x in after.items() if torch.equal(x.float(), before[name].float())}
    wanted = {name for name in before if name.endswith((".beta", ".eps"))}
    assert kept == wanted | ({"lm_head.weight"} if freeze == "unembed" else set())


@pytest.mark.parametrize(
    "flags,message",
    [
        ({"engine": "native"}, "--engine=native: the policy is GPT2LMHeadModel, transformers' own code.*--engine=hf"),
        ({"new_tokens_per_step": 2}, "--new_tokens_per_step=2: --engine=hf writes whole completions only"),
        ({"dtype": "float64"}, "--engine=hf: transformers' generate gives float32 at most"),
        ({"compile": "on"}, "--compile=on: the policy is GPT2LMHeadModel, transformers' own code"),
        ({"mesh": "tp2", "generate_mesh": "dp2"}, "tp2: the policy is GPT2LMHeadModel.*not split over tp; use dp"),
        ({"repetition_penalty": 1.2, "top_k": 0}, "--engine=hf: a repetition_penalty of 1.2"),
        ({"model_code": "native"}, "model_type is 'gpt2', supported are"),
        ({"lora_rank": 4}, "--lora_rank=4: GPT2LMHeadModel takes no adapters here"),
    ],
)
def test_what_it_cannot_do_is_refused_before_the_run(flags, message, folders, tmp_path):
    with pytest.raises((SettingsError, MeshError), match=message):
        funrl.train("grpo", model=folders["gpt2"], reward=digits, run_dir=str(tmp_path / "run"), **RUN | flags)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_dry_run_counts_all_but_generation(folders):
    settings = settings_of(model=folders["gpt2"], mesh="dp2", fsdp=True, max_new_tokens=8, batch_prompts=8)
    result = estimate(plain_job(settings, recipe("ppo")(), 1e12), 8, HARDWARE["cpu"])
    assert "generation, which runs transformers' own code" in result.left_out
    assert result.phases["update_policy"].flops > 2 * result.phases["score_reference"].flops > 0
    assert result.phases["generate"].flops == 0 < result.phases["generate"].total
