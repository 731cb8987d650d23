"""Runs of a model with states: it learns from texts and by its own samples on meshes, and some is refused."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

import funrl
from funrl.cli.run import main
from funrl.mesh.mesh import MeshError
from funrl.tasks import arithmetic
from funrl.trainer.settings.declaration import SettingsError

NEXT = {
    "num_hidden_layers": 3, "layer_types": ["linear_attention"] * 2 + ["full_attention"], "hidden_size": 16,
    "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
    "max_position_embeddings": 128,
}  # fmt: skip
FLAGS = ("--device=cpu", "--compile=off", "--dtype=float64", "--batch_prompts=4", "--eval_prompts=4", "--lr=1e-2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model with the tokenizer of the embedded task."""
    tokenizer = arithmetic.tokenizer()
    torch.manual_seed(0)
    path = str(tmp_path_factory.mktemp("next"))
    config = transformers.AutoConfig.for_model("qwen3_next", vocab_size=len(tokenizer), bos_token_id=1, **NEXT)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.slow
@pytest.mark.gloo
def test_it_learns_from_texts_alike_on_every_mesh(folder, tmp_path):
    data = tmp_path / "texts.jsonl"
    texts = [{"prompt": f"{i}+{i + 3}=", "completion": str(2 * i + 3)[::-1]} for i in range(16)]
    data.write_text("\n".join(map(json.dumps, texts)))
    rows, weights, samples = {}, {}, {}
    for mesh, more in (
        ("dp1", ()),
        ("dp2", ("--fsdp",)),
        ("tp2", ("--split_residual=on",)),
        ("sp2", ("--fsdp", "--remat=selective")),
    ):
        run = tmp_path / mesh
        flags = (
            *FLAGS,
            f"--model={folder}",
            f"--data={data}",
            f"--eval_data={data}",
            "--steps=2",
            f"--mesh={mesh}",
            f"--run_dir={run}",
        )
        assert main("sft", ["sft", *flags, *more]) == 0
        rows[mesh] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        weights[mesh] = load_file(run / "model/model.safetensors")
        samples[mesh] = (run / "samples.jsonl").read_text()
    assert len(samples["dp1"].splitlines()) >= 8 and set(samples.values()) == {samples["dp1"]}
    before = load_file(f"{folder}/model.safetensors")
    name = "model.layers.1.linear_attn.in_proj_qkvz.weight"
    assert (weights["dp1"][name].float() - before[name]).abs().max() > 1e-4
    for mesh in ("dp2", "tp2", "sp2"):
        for one, row in zip(rows["dp1"], rows[mesh], strict=True):
            assert row["train/loss"] == pytest.approx(one["train/loss"], abs=1e-9)
            assert row["train/grad_norm"] == pytest.approx(one["train/grad_norm"], abs=1e-9)
        for key, x in weights["dp1"].items():
            assert (weights[mesh][key] - x).abs().max() < 1e-7, key
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tp2/model")


@pytest.mark.parametrize(
    "recipe,flags,message",
    [
        ("grpo", {"speculate": 2}, "speculate=2: layers of a qwen3_next keep a state, which cannot take back"),
        ("grpo", {"engine": "hf"}, "engine=hf: the policy has experts, which --engine=native generates with"),
        (
            "rollout_is",
            {"keep_cache": True, "staleness": 1, "place": "train:1 generate:1"},
            "keep_cache: layers of a qwen3_next",
        ),
        (
            "grpo",
            {"backend": "xla", "compile": "on", "mesh": "dp2"},
            "generate_mesh=dp2: layers of a qwen3_next keep a state, .* give --generate_mesh=tp2",
        ),
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
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"{i}+{i + 3}=", "answer": str(2 * i + 3)}) for i in range(16)))
    reward = tmp_path / "reward.py"
    reward.write_text("def score(prompt, completion, **_):\n    return float(sum(map(ord, completion)) % 7)\n")
    rows = {}
    meshes = {"dp1": (), "dp2": ("--fsdp",), "tp2": ("--new_tokens_per_step=6", "--state_snapshot_tokens=16")}
    meshes |= {"sp2": ("--token_budget=32",)}
    for mesh, more in meshes.items():
        run = tmp_path / mesh
        flags = (
            *FLAGS,
            f"--model={folder}",
            f"--prompts={prompts}",
            f"--reward={reward}:score",
            "--max_new_tokens=8",
            "--samples_per_prompt=2",
            "--steps=2",
            f"--mesh={mesh}",
            f"--run_dir={run}",
        )
        assert main("grpo", ["grpo", *flags, *more]) == 0
        rows[mesh] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        gaps = [row["rollout/logprob_gap_max"] for row in rows[mesh] if "rollout/logprob_gap_max" in row]
        assert gaps and max(gaps) < 1e-10
    for mesh in ("dp2", "sp2"):
        for one, row in zip(rows["dp1"], rows[mesh], strict=True):
            assert row.get("train/loss") == pytest.approx(one.get("train/loss"), abs=1e-9)
