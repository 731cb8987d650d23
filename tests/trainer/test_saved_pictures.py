"""Pictures of saved rows: digests and paths are saved, and a replay reads the files again."""

import json
import re

import numpy as np
import pytest
from picture_runs import save_seeing_model, save_tiled_model
from PIL import Image
from safetensors.torch import load_file
from small_runs import GRPO, SMALL, Quiet
from test_picture_jobs import data_url, write
from test_replay import unlike

from funrl.cli.replay import missing_picture
from funrl.data.pictures import picture_form_of
from funrl.mesh.mesh import single
from funrl.models.vision.inputs import GRIDS, single_pictures
from funrl.trainer.checkpoints.saved_pictures import picture_reader
from funrl.trainer.checkpoints.saved_rows import open_rows, read_rows
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.loop import train_loop
from funrl.trainer.replay import replay
from funrl.trainer.settings.settings import settings_of
from funrl.trainer.storage.shard_server import CheckpointError


def draw(path, seed, size=(16, 8)):
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def test_pictures_in_tiles_are_known_alone_and_beside_others(tmp_path):
    save_tiled_model(tmp_path / "model")
    path = str(tmp_path / "a.png")
    draw(path, 0, (16, 8))
    (tmp_path / "reward.py").write_text("def score(prompt, completion, **fields):\n    return 1.0\n")
    records = [{"prompt": "a ?", "images": [path] * n} for n in (1, 2)] * 8
    given = {"model": str(tmp_path / "model"), "prompts": write(tmp_path / "prompts.jsonl", records)}
    job = prepare(settings_of(**SMALL | given | {"reward": f"{tmp_path / 'reward.py'}:score"}), GRPO)
    tower = picture_form_of(job.tokenizer).tower
    counts = {len(example.owned.values[GRIDS]): example.owned.values for example in job.task.prompts}
    seen = [single_pictures(tower, counts[n])[0].digest for n in (1, 2)]
    digests = [value.digest for value in picture_reader(job.tokenizer)(path)]
    assert digests == seen and seen[0] != seen[1]


def test_a_replay_reads_the_files_and_compares_them_with_their_digests(tmp_path):
    save_seeing_model(tmp_path / "model")
    paths = [str(tmp_path / f"{n}.png") for n in range(12)]
    for n, path in enumerate(paths):
        draw(path, n, ((16, 8), (8, 24))[n % 2])
    records = [{"prompt": "a cab ?", "images": [data_url(8, 8), path]} for path in paths]
    (tmp_path / "reward.py").write_text("def score(prompt, completion, **fields):\n    return len(completion)\n")
    given = {
        **{"model": str(tmp_path / "model"), "prompts": write(tmp_path / "prompts.jsonl", records), "steps": 1},
        **{"reward": f"{tmp_path / 'reward.py'}:score", "reward_workers": 0, "save_rollouts": 1},
    }
    job = prepare(settings_of(**SMALL | given), GRPO)
    run = tmp_path / "run"
    train_loop(job, single(), Quiet(str(run / "checkpoints")))
    step = run / "rollouts" / "step-1"
    values = [value for row in json.loads((step / "pictures-0.json").read_text()) for value in row]
    sources = [path for _, path, _ in values]
    assert sources[::2] == [None] * len(sources[::2]) and set(sources[1::2]) < {*paths}
    assert len(load_file(step / "rows-0.safetensors")["drawn/patches"]) == 4 * len(values[::2])
    assert unlike(replay(job, run, None, single(), Quiet())) == []
    patches = read_rows(open_rows(step.parent, 1), single()).batch.patches.values  # without a reader
    assert len(patches) == sum(count for _, _, count in values)
    changed = sources[1]
    draw(changed, 99)
    was = f"the digest of its patches was {values[1][0][:12]}"
    words = rf"the picture {re.escape(changed)} has changed; {was}, and is \w{{12}} now: put the file back"
    with pytest.raises(CheckpointError, match=words):
        read_rows(open_rows(step.parent, 1, read=picture_reader(job.tokenizer)), single())
    (tmp_path / changed).unlink()
    assert missing_picture(step.parent) == f"{step}: the picture {changed} is not there; {was}: put the file back"
