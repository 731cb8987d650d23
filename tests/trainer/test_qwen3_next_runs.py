"""Runs of a model with states: it learns from texts and by its own samples on meshes, and some is refused."""

import pytest
import torch
import transformers
from mesh_runs import assert_equal_metrics, learn_by_samples, learn_from_texts, saved_model

import funrl
from funrl.mesh.mesh import MeshError
from funrl.tasks import arithmetic
from funrl.trainer.settings.declaration import SettingsError

NEXT = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("next"), "qwen3_next", **NEXT)


@pytest.mark.slow
@pytest.mark.gloo
def test_it_learns_from_texts_alike_on_every_mesh(folder, tmp_path):
    meshes = {"dp1": (), "tp2": ("--split_residual=on",), "sp2": ("--fsdp", "--remat=selective")}
    changes = learn_from_texts(meshes, folder, tmp_path)
    assert changes["model.layers.0.linear_attn.in_proj_qkvz.weight"] > 1e-4
    samples = {(tmp_path / mesh / "samples.jsonl").read_text() for mesh in meshes}
    assert len(samples) == 1 and len(samples.pop().splitlines()) >= 8


@pytest.mark.parametrize(
    "recipe,flags,message",
    [
        ("grpo", {"speculate": 2}, "speculate=2: layers of a qwen3_next keep a state, which cannot take back"),
        ("grpo", {"engine": "hf"}, "engine=hf: the policy has experts; give --engine=native"),
        ("sft", {"mesh": "tp4"}, "heads has size 2, which does not divide over tp4"),
    ],
)
def test_what_it_cannot_do_is_refused_before_the_run(recipe, flags, message, folder, tmp_path):
    more = {"reward": lambda prompt, completion: 1.0, "prompts": [{"prompt": "1+2="}]} if recipe != "sft" else {}
    with pytest.raises((SettingsError, MeshError), match=message):
        funrl.train(recipe, model=folder, device="cpu", run_dir=str(tmp_path / "run"), steps=1, **more, **flags)
    assert not (tmp_path / "run").exists()


def test_it_completes_texts(folder):
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = arithmetic.tokenizer()
    (text,) = funrl.generate(folder, ["1+2="], greedy=True, max_new_tokens=8)
    prompt = tokenizer("1+2=", return_tensors="pt").input_ids
    theirs = peer.generate(prompt, do_sample=False, max_new_tokens=8)[0, prompt.shape[1] :].tolist()
    assert text and tokenizer.decode(theirs, skip_special_tokens=True).startswith(text)


@pytest.mark.slow
@pytest.mark.gloo
def test_it_learns_by_its_own_samples_alike_on_every_mesh(folder, tmp_path):
    meshes = {"dp1": (), "tp2": ("--new_tokens_per_step=6", "--state_snapshot_tokens=16")}
    meshes |= {"sp2": ("--token_budget=32",)}
    rows, gap = learn_by_samples(meshes, folder, tmp_path)
    assert gap < 1e-10
    assert_equal_metrics(rows, ("sp2",), "train/loss")
