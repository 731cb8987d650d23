"""The preset for problems of geometry with pictures, from files of a data set to a saved directory."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from picture_runs import TEMPLATE, save_seeing_model
from PIL import Image

from funrl import trees
from funrl.cli.run import main
from funrl.models.huggingface.directories import load

PRESET = Path(__file__).parents[2] / "recipes" / "qwen2.5_vl_7b_8gpus.yaml"
SMALL = (
    "--device=cpu",
    "--compile=off",
    "--mesh=dp2",
    "--generate_mesh=dp2",
    "--reward_workers=0",
    "--steps=2",
    "--batch_prompts=4",
    "--samples_per_prompt=2",
    "--max_new_tokens=6",
    "--eval_prompts=2",
    "--lr=0.01",
    "--lr_warmup_steps=0",
)


def png(number):
    file = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (8 + 8 * (number % 3), 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.mark.slow
@pytest.mark.gloo
def test_the_preset_trains_a_saved_directory_on_a_data_set_in_files(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    save_seeing_model(tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").write_text(TEMPLATE)
    rows = [  # the columns of hiyouga/geometry3k
        {"images": [{"bytes": png(n), "path": None}], "problem": f"<image>a cab {'abcd'[n % 4]} ?", "answer": "b"}
        for n in range(20)
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    reward = "def score(prompt, completion, images, answer):\n    return completion.count(answer) + len(images)\n"
    (tmp_path / "reward.py").write_text(reward)
    run = tmp_path / "run"
    given = [f"--model={tmp_path / 'base'}", f"--prompts={tmp_path / 'train.parquet'}", "--fields=prompt:problem"]
    given += [f"--reward={tmp_path / 'reward.py'}:score", f"--run_dir={run}"]
    assert main("grpo", ["grpo", f"--config={PRESET}", *given, *SMALL]) == 0
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(row["step"] for row in metrics) == 2 and any(row.get("eval/reward", 0) >= 1 for row in metrics)
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert samples and all(len(sample["pictures"]) == 1 and "cab" in sample["prompt"] for sample in samples)
    (_, before), (model, after) = (load(folder, torch.bfloat16) for folder in (tmp_path / "base", run / "model"))
    pairs = zip(trees.named(before), trees.leaves(after), strict=True)
    learned = {name for (name, x), y in pairs if not torch.equal(x, y)}
    assert not any(name.startswith(("vision/embed", "vision/layers")) for name in learned)
    assert any(name.startswith("vision/merger") for name in learned) and model.owned is not None
