"""Short runs of a random model on several meshes, which give the same numbers."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from funrl.cli.run import main
from funrl.tasks import arithmetic

FLAGS = (
    "--device=cpu",
    "--compile=off",
    "--dtype=float64",
    "--batch_prompts=4",
    "--eval_prompts=4",
    "--lr=1e-2",
)


def saved_model(path, family, **sizes):
    """The directory of a random model of a family of transformers, with the tokenizer of the embedded task."""
    tokenizer = arithmetic.tokenizer()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, vocab_size=len(tokenizer), bos_token_id=1, **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def metrics_on(meshes, recipe, folder, *flags):
    """The metrics of each step of a run on each mesh, whose directory has the mesh's name.

    Args:
      meshes: a mesh -> further flags of its run.
      folder: of the runs.
    """
    rows = {}
    for mesh, more in meshes.items():
        run = folder / mesh
        assert main(recipe, [recipe, *FLAGS, *flags, f"--mesh={mesh}", f"--run_dir={run}", *more]) == 0
        rows[mesh] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return rows


def assert_equal_metrics(rows, meshes, *names):
    """The metrics of these names are those of dp1, or are missing on both."""
    for mesh in meshes:
        for item, row in zip(rows["dp1"], rows[mesh], strict=True):
            for name in names:
                assert row.get(name) == pytest.approx(item.get(name), abs=1e-9), (mesh, name)


def learn_from_texts(meshes, model, folder):
    """Supervised runs of a step with the same numbers on all meshes; the most by which each weight has changed."""
    data = folder / "texts.jsonl"
    texts = [{"prompt": f"{i}+{i + 3}=", "completion": str(2 * i + 3)[::-1]} for i in range(16)]
    data.write_text("\n".join(map(json.dumps, texts)))
    rows = metrics_on(meshes, "sft", folder, f"--model={model}", f"--data={data}", f"--eval_data={data}", "--steps=1")
    assert all("train/loss" in row and "train/grad_norm" in row for row in rows["dp1"])
    assert_equal_metrics(rows, meshes, "train/loss", "train/grad_norm")
    weights = {mesh: load_file(folder / mesh / "model/model.safetensors") for mesh in meshes}
    for mesh in meshes:
        for name, x in weights["dp1"].items():
            assert (weights[mesh][name] - x).abs().max() < 1e-7, (mesh, name)
    transformers.AutoModelForCausalLM.from_pretrained(folder / "tp2/model")
    before = load_file(f"{model}/model.safetensors")
    return {name: (x.float() - before[name]).abs().max() for name, x in weights["dp1"].items()}


def learn_by_samples(meshes, model, folder):
    """The metrics of GRPO's runs on each mesh, and their gaps."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"{i}+{i + 3}=", "answer": str(2 * i + 3)}) for i in range(16)))
    reward = folder / "reward.py"
    reward.write_text("def score(prompt, completion, **_):\n    return float(sum(map(ord, completion)) % 7)\n")
    flags = f"--model={model}", f"--prompts={prompts}", f"--reward={reward}:score"
    rows = metrics_on(meshes, "grpo", folder, *flags, "--max_new_tokens=8", "--samples_per_prompt=2", "--steps=2")
    gap = "rollout/logprob_gap_max"
    gaps = {mesh: [row[gap] for row in rows[mesh] if gap in row] for mesh in meshes}
    assert all(gaps.values())
    return rows, max(map(max, gaps.values()))
