"""Runs of a Gemma 4 with all its parts: layers that lend keys, vectors of layers, experts; alike on every mesh."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from funrl.cli.run import main
from funrl.tasks import arithmetic

FLAGS = ("--device=cpu", "--compile=off", "--dtype=float64", "--batch_prompts=4", "--eval_prompts=4", "--lr=1e-2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model with the tokenizer of the embedded task."""
    tokenizer = arithmetic.tokenizer()
    torch.manual_seed(0)
    path = str(tmp_path_factory.mktemp("gemma4"))
    config = transformers.AutoConfig.for_model(
        "gemma4_text", vocab_size=len(tokenizer), vocab_size_per_layer_input=len(tokenizer), hidden_size=16,
        intermediate_size=24, num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, global_head_dim=12, num_global_key_value_heads=1,
        attention_k_eq_v=True, sliding_window=6, num_kv_shared_layers=2, use_double_wide_mlp=True,
        hidden_size_per_layer_input=4, enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=8,
        max_position_embeddings=128, final_logit_softcapping=5.0, bos_token_id=1,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def metrics_of(recipe, run, mesh, flags):
    assert main(recipe, [recipe, *FLAGS, "--steps=2", f"--mesh={mesh}", f"--run_dir={run}", *flags]) == 0
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.gloo
def test_it_learns_from_texts_alike_on_every_mesh(folder, tmp_path):
    data = tmp_path / "texts.jsonl"
    texts = [{"prompt": f"{i}+{i + 3}=", "completion": str(2 * i + 3)[::-1]} for i in range(16)]
    data.write_text("\n".join(map(json.dumps, texts)))
    flags = (f"--model={folder}", f"--data={data}", f"--eval_data={data}")
    meshes = {"dp1": (), "dp2": ("--fsdp",), "tp2": ("--split_residual=on",), "ep2": (), "sp2": ("--remat=full",)}
    rows = {mesh: metrics_of("sft", tmp_path / mesh, mesh, (*flags, *more)) for mesh, more in meshes.items()}
    weights = {mesh: load_file(tmp_path / mesh / "model/model.safetensors") for mesh in meshes}
    before = load_file(f"{folder}/model.safetensors")
    changes = {name: (x.float() - before[name]).abs().max() for name, x in weights["dp1"].items()}
    assert all((change > 0) != name.endswith("layer_scalar") for name, change in changes.items())
    for mesh in meshes:
        for one, row in zip(rows["dp1"], rows[mesh], strict=True):
            assert row["train/loss"] == pytest.approx(one["train/loss"], abs=1e-9)
            assert row["train/grad_norm"] == pytest.approx(one["train/grad_norm"], abs=1e-9)
        for key, x in weights["dp1"].items():
            assert (weights[mesh][key] - x).abs().max() < 1e-7, (mesh, key)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tp2/model")


@pytest.mark.slow
@pytest.mark.gloo
def test_it_learns_by_its_own_samples_alike_on_every_mesh(folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"{i}+{i + 3}=", "answer": str(2 * i + 3)}) for i in range(16)))
    reward = tmp_path / "reward.py"
    reward.write_text("def score(prompt, completion, **_):\n    return float(sum(map(ord, completion)) % 7)\n")
    flags = (
        f"--model={folder}", f"--prompts={prompts}", f"--reward={reward}:score", "--max_new_tokens=8",
        "--samples_per_prompt=2",
    )  # fmt: skip
    meshes = {"dp1": (), "dp2": ("--fsdp",), "tp2": ("--new_tokens_per_step=6",), "ep2": ("--lora_rank=2",)}
    rows = {mesh: metrics_of("grpo", tmp_path / mesh, mesh, (*flags, *more)) for mesh, more in meshes.items()}
    for mesh in meshes:
        gaps = [row["rollout/logprob_gap_max"] for row in rows[mesh] if "rollout/logprob_gap_max" in row]
        assert gaps and max(gaps) == 0
    for mesh in ("dp2", "tp2"):
        for one, row in zip(rows["dp1"], rows[mesh], strict=True):
            assert row.get("train/loss") == pytest.approx(one.get("train/loss"), abs=1e-9)
