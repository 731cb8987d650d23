"""Jobs on files with pictures: what is read before the first step, and what is refused there."""

import base64
import io
import json
import re
import shutil

import numpy as np
import pytest
import torch
from picture_runs import save_seeing_model
from PIL import Image
from small_runs import GRPO, SMALL

import funrl
from funrl.algos.recipes.sft import sft
from funrl.cli.evaluate import settings_of_stored
from funrl.data.pictures import (
    PROCESSOR,
    patches_of,
    picture_form,
    picture_form_of,
    read_picture,
    with_picture_form,
)
from funrl.data.supervised import Text
from funrl.data.tokenizer import character_tokenizer
from funrl.mesh.mesh import single
from funrl.models import decoder_config, decoder_model, with_value_head, with_vision
from funrl.models.decoder.routing import Experts
from funrl.models.errors import ModelError
from funrl.models.huggingface.directories import save
from funrl.models.vision.config import TowerConfig, TowerForm
from funrl.models.vision.tower import normalized
from funrl.rollout.vllm.pictures import vllm_prompt
from funrl.trainer.checkpoints.stored_models import find_stored_model
from funrl.trainer.inference import prepare_inference
from funrl.trainer.jobs.compatibility import check_owned_values
from funrl.trainer.jobs.datasets import check_text_prompts
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.jobs.row_source import text_rows
from funrl.trainer.settings.scorers import Given
from funrl.trainer.settings.settings import settings_of


def data_url(width, height, mode="RGB"):
    draw = np.random.default_rng(width)
    image = Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8)).convert(mode)
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory of a tiny Qwen2.5-VL, files of prompts and demonstrations, and a reward."""
    path = tmp_path_factory.mktemp("pictures")
    save_seeing_model(path / "model")
    pictures = [[data_url(16, 8)], [], [data_url(40, 40, "LA"), data_url(8, 8)]]
    prompts = [{"prompt": "a cab ?", "images": pictures[i % 3], "answer": "b"} for i in range(12)]
    write(path / "prompts.jsonl", prompts)
    write(path / "texts.jsonl", [{**record, "completion": "b"} for record in prompts])
    (path / "reward.py").write_text("def score(prompt, completion, images, **fields):\n    return float(len(images))\n")
    return path


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def job_of(folder, compose=GRPO, **flags):
    given = {"model": str(folder / "model")} | flags
    small = {
        name: x for name, x in SMALL.items() if compose is GRPO or name not in ("samples_per_prompt", "max_new_tokens")
    }
    return prepare(settings_of(**small | given), compose)


def rl(folder, **flags):
    data = {"prompts": str(folder / "prompts.jsonl"), "reward": f"{folder / 'reward.py'}:score", "reward_workers": 0}
    return job_of(folder, **data | flags)


def test_prompts_of_a_file_own_their_pictures(folder):
    job = rl(folder)
    examples = [*job.task.prompts, *job.task.heldout]
    grids = sorted({tuple(map(tuple, example.owned.values["grids"].tolist())) for example in examples})
    assert grids == [(), ((2, 4),), ((8, 8), (2, 2))]
    tower = job.model.config.tower
    for example in examples:
        tokens = sum(h * w // 4 for h, w in example.owned.values["grids"].tolist())
        assert example.tokens.count(tower.placeholder) == tokens
    assert job.task.rewards[0]("p", "c", **examples[0].fields) == len(examples[0].fields["images"])


def test_demonstrations_of_a_file_become_rows_with_pictures(folder):
    job = job_of(folder, sft, data=str(folder / "texts.jsonl"))
    rows = text_rows(job, single(), list(job.task.examples)[:3])
    batch = rows.batch
    placeholders = (batch.tokens == job.model.config.tower.placeholder).sum(1)
    assert (batch.patches.offsets.diff() == 4 * placeholders).all() and batch.patches.values.dtype == torch.uint8
    assert batch.mask.sum(1).tolist() == [2, 2, 2] and not batch.mask[batch.tokens >= 12].any()


@pytest.mark.parametrize(
    "flags,words",
    [
        ({"engine": "hf"}, "--engine=hf: the policy sees pictures; give --engine=native or vllm"),
        ({"long_prompts": "truncate"}, "--long_prompts=truncate: .* give --long_prompts=drop"),
        ({"new_tokens_per_step": 2}, "--new_tokens_per_step=2: the policy sees pictures; leave it out"),
        ({"freeze": "visoin"}, "--freeze=visoin: no weight's name begins with 'visoin'"),
    ],
)
def test_what_pictures_cannot_do_yet_is_refused(folder, flags, words):
    with pytest.raises(ValueError, match=words):
        rl(folder, **flags)


@pytest.mark.parametrize("flag", ["reward_model", "process_reward_model"])
def test_reward_models_beside_a_policy_that_sees_are_refused(folder, tmp_path, flag):
    path = tmp_path / "reads text"
    config = decoder_config(vocab=16, embed=16, layers=1, heads=2, kv_heads=1, head=8, mlp=16, eos=(1,))
    model = with_value_head(decoder_model(config))
    save(path, model, model.init(torch.Generator().manual_seed(0)), character_tokenizer("abcdefgh ?"))
    with pytest.raises(ValueError, match=f"--{flag}=.*: the policy sees pictures; it reads text"):
        rl(folder, **{flag: str(path)})


def test_a_role_that_reads_text_beside_a_policy_that_sees_is_refused(folder):
    job = rl(folder)
    config = decoder_config(vocab=16, embed=16, layers=1, heads=2, kv_heads=1, head=8, mlp=16)
    critic = with_value_head(decoder_model(config))
    check_owned_values(job.settings, {"policy": job.model, "critic": with_value_head(job.model)}, job.algorithm)
    with pytest.raises(ValueError, match="the critic reads text only, but the policy sees pictures"):
        check_owned_values(job.settings, {"policy": job.model, "critic": critic}, job.algorithm)


def test_devices_of_torch_xla_are_refused(folder):
    job = rl(folder)
    with pytest.raises(ValueError, match="--device=xla: the policy sees pictures; give --device=cpu"):
        check_owned_values(settings_of(**SMALL | {"device": "xla"}), {"policy": job.model}, job.algorithm)


def test_an_environment_of_another_framework_takes_no_prompts_with_pictures(folder):
    prompts = rl(folder).task.prompts
    check_text_prompts("agents.py:Counts", prompts)
    check_text_prompts("gymnasium:agents.py:Counts", [example for example in prompts if example.owned.empty])
    with pytest.raises(
        ValueError, match=r"--env=gymnasium:a.py:B: environments of gymnasium get text, and .*jsonl.* has pictures"
    ):
        check_text_prompts("gymnasium:a.py:B", prompts)


def test_rows_whose_placeholders_are_not_those_of_their_pictures_are_refused_on_the_host(folder):
    job = job_of(folder, sft, data=str(folder / "texts.jsonl"))
    example = next(x for x in job.task.examples if not x.owned[0].empty)
    (text,) = example.texts
    cut = example._replace(texts=(Text(text.tokens[2:], text.trained[2:]),))
    with pytest.raises(ModelError, match="placeholders of pictures has pictures of"):
        text_rows(job, single(), [cut])


@pytest.mark.parametrize(
    "images,words",
    [
        (["/no/such.png"], "line 1: the picture /no/such.png is not there"),
        ([data_url(4000, 1)], "4000 x 1 pixels: one side is more than 200 times the other"),
        (["data:image/png;base64,aGVsbG8="], "cannot be read"),
    ],
)
def test_a_bad_picture_is_one_line_with_file_and_line(folder, tmp_path, images, words):
    file = write(tmp_path / "bad.jsonl", [{"prompt": "a", "images": images}])
    with pytest.raises(ValueError, match=f"--prompts: .*bad.jsonl.*{words}") as error:
        rl(folder, prompts=file)
    assert "\n" not in str(error.value)


def test_an_evaluation_reads_pictures(folder):
    stored = find_stored_model(folder / "model")
    given = Given(rewards=(lambda prompt, completion, images, **fields: float(len(images)),))
    own = {"data": str(folder / "prompts.jsonl"), "max_new_tokens": 2}
    job = prepare_inference(settings_of_stored("evaluate", stored, own, given, 0), stored, given)
    assert [len(example.owned.values["grids"]) for example in job.task.heldout[:3]] == [1, 0, 2]
    assert picture_form_of(job.tokenizer).max_pixels == 1024


def messages_with(*images):
    return [{"role": "user", "content": [*({"type": "image", "image": x} for x in images), text_part("a cab ?")]}]


def text_part(text):
    return {"type": "text", "text": text}


@pytest.fixture
def chat_folder(folder, tmp_path):
    """The model with a chat template for pictures, and with the file of one."""
    shutil.copytree(folder / "model", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}{% for c in m.content %}{{ '<|image_pad|>' if c.type == 'image' else c.text }}"
        "{% endfor %}{% endfor %}"
    )
    Image.fromarray(np.full((8, 16, 3), 200, dtype=np.uint8)).save(tmp_path / "a.png")
    return tmp_path


def test_a_prompt_of_generate_may_have_pictures(chat_folder):
    file = chat_folder / "a.png"
    record = {"prompt": "<image>a cab ?", "images": [str(file)]}
    given = [messages_with(str(file)), messages_with(file.read_bytes()), messages_with(Image.open(file)), record]
    other = Image.fromarray(np.zeros((8, 16, 3), dtype=np.uint8))
    several = [*given, messages_with(other), messages_with(), "a cab ?", messages_with(str(file), other)]
    texts = funrl.generate(chat_folder / "model", several, max_new_tokens=12)
    assert texts[0] == texts[1] == texts[2] and len(set(texts[:3] + texts[4:5])) == 2
    assert texts == funrl.generate(chat_folder / "model", several, max_new_tokens=12, mesh="dp2")


@pytest.mark.parametrize(
    "prompt,words",
    [
        (messages_with("/no/such.png"), "the picture /no/such.png is not there"),
        (messages_with(b"no picture"), "the picture of 10 bytes cannot be read"),
        (messages_with(Image.new("RGB", (4000, 1))), "4000 x 1 pixels: one side is more than 200 times"),
        ([{"role": "user", "content": [{"type": "image"}]}], "1 places for pictures .* and 0 pictures"),
        ({"prompt": "a", "images": "x.png"}, "'images' must be a list of pictures, not str"),
    ],
)
def test_a_prompt_of_generate_with_a_bad_picture_is_refused_in_one_line(chat_folder, prompt, words):
    with pytest.raises(ValueError, match=words) as error:
        funrl.generate(chat_folder / "model", [prompt], max_new_tokens=2)
    assert "\n" not in str(error.value)


def test_a_bound_on_pixels_makes_pictures_smaller_and_is_saved(folder, tmp_path):
    job = rl(folder, max_pixels=256)
    grids = [x for example in (*job.task.prompts, *job.task.heldout) for x in example.owned.values["grids"].tolist()]
    assert sorted({tuple(grid) for grid in grids}) == [(2, 2), (2, 4), (4, 4)]
    form = picture_form_of(job.tokenizer)
    save(tmp_path / "model", job.model, job.model.init(torch.Generator().manual_seed(0)), job.tokenizer)
    assert picture_form(job.model.config, str(tmp_path / "model")) == form
    example = next(x for x in job.task.prompts if len(x.owned.values["grids"]) == 2)
    images = vllm_prompt(job.model.config.tower, example.tokens, example.owned)["multi_modal_data"]["image"]
    assert [image.size for image in images] == [(16, 16), (8, 8)]


def test_an_evaluation_has_the_bound_of_its_run(folder):
    stored = find_stored_model(folder / "model")
    given = Given(rewards=(lambda prompt, completion, images, **fields: float(len(images)),))
    own = {"data": str(folder / "prompts.jsonl"), "max_new_tokens": 2}
    job = prepare_inference(
        settings_of_stored("evaluate", stored, own, given, 0), stored._replace(flags={"max_pixels": 256}), given
    )
    assert picture_form_of(job.tokenizer).max_pixels == 256


@pytest.mark.parametrize(
    "pixels,words",
    [(63, "63 pixels are less than the 64 of one token; give more"), (0, "it must be at least 1")],
)
def test_a_bound_that_is_too_small_is_refused(folder, pixels, words):
    with pytest.raises(ValueError, match=f"--max_pixels={pixels}: {words}"):
        rl(folder, max_pixels=pixels)


def test_a_bound_below_that_of_the_file_is_refused(folder, tmp_path):
    shutil.copytree(folder / "model", tmp_path / "model")
    (tmp_path / "model" / PROCESSOR).write_text(json.dumps({"min_pixels": 128, "max_pixels": 1024}))
    words = "--max_pixels=64: 64 pixels are less than the 128 that a picture has at least; give more"
    with pytest.raises(ValueError, match=words):
        rl(folder, model=str(tmp_path / "model"), max_pixels=64)


@pytest.mark.parametrize(
    "file,words",
    [
        (
            '{"image_mean": [0.5, 0.5, 0.5]}',
            "has image_mean [0.5, 0.5, 0.5], but the model takes [0.48145466, 0.4578275",
        ),
        ('{"image_std": [0.5]}', "has image_std [0.5], but the model takes [0.26862954, 0.26130258"),
        ('{"image_std": "large"}', "has image_std large, but the model takes [0.26862954, 0.26130258"),
        ('{"patch_size": 14}', "has patch_size 14, but the model takes 4; write that, or leave it out"),
        ('{"patch_size": 4', "is not JSON"),
        ("[]", "holds list, not an object"),
    ],
)
def test_a_processor_that_makes_other_pixels_is_refused(folder, tmp_path, file, words):
    shutil.copytree(folder / "model", tmp_path / "model")
    (tmp_path / "model" / PROCESSOR).write_text(file)
    with pytest.raises(ValueError, match=f"--model=.*: {re.escape(f'{PROCESSOR} {words}')}"):
        rl(folder, model=str(tmp_path / "model"))


def test_a_processor_with_the_models_own_numbers_is_read(folder, tmp_path):
    shutil.copytree(folder / "model", tmp_path / "model")
    own = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "patch_size": 4, "merge_size": 2, "max_pixels": 512}
    (tmp_path / "model" / PROCESSOR).write_text(json.dumps(own))
    assert picture_form_of(rl(folder, model=str(tmp_path / "model")).tokenizer).max_pixels == 512


def test_a_bound_on_pixels_of_a_model_that_reads_text_is_refused():
    with pytest.raises(ValueError, match="--max_pixels=4096 does nothing without a model that sees pictures"):
        prepare(settings_of(**SMALL, max_pixels=4096), GRPO)


def assert_read_alike(directory, tokenizer):
    """A saved directory's processor makes the pixels that our models take."""
    from transformers import AutoImageProcessor

    picture = np.random.default_rng(0).integers(0, 256, (31, 46, 3), dtype=np.uint8)
    processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
    given = processor([Image.fromarray(picture)], return_tensors="pt")
    form = picture_form_of(tokenizer)
    patches, grid = patches_of(read_picture(picture), form)
    pixels = normalized(torch.from_numpy(patches), torch.float32, form.tower.form)
    ours = pixels.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1)
    assert given["image_grid_thw"].tolist() == [[1, *grid]]
    assert (given["pixel_values"] - ours).abs().max() < 1e-6


def test_saved_directories_tell_transformers_how_to_take_pictures(folder, tmp_path):
    job = rl(folder)
    save(tmp_path / "copy", job.model, job.model.init(torch.Generator().manual_seed(0)), job.tokenizer)
    assert (tmp_path / "copy" / PROCESSOR).read_text() == (folder / "model" / PROCESSOR).read_text()
    tokenizer = with_picture_form(character_tokenizer("ab"), picture_form(job.model.config))
    save(tmp_path / "new", job.model, job.model.init(torch.Generator().manual_seed(0)), tokenizer)
    assert_read_alike(tmp_path / "new", tokenizer)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe"])
def test_so_do_those_of_a_qwen3_vl(family, tmp_path):
    experts = Experts(count=4, per_token=2, mlp=8) if family == "qwen3_vl_moe" else None
    sizes = {"vocab": 48, "embed": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head": 8, "mlp": 16}
    config = decoder_config(**sizes, family=family, experts=experts, qk_norm=True, rope_axes=(0, 1, 2, 0))
    form = TowerForm(
        norm="layer", gated=False, patch_bias=True, table=3, deep_layers=(0,), mean=(0.5,) * 3, std=(0.5,) * 3
    )
    sides = {"layers": 1, "embed": 16, "heads": 1, "inner": 16, "patch": 4, "window": None, "form": form}
    tower = TowerConfig(**sides, placeholder=44, banned=(45,), begin=46, end=47)
    model = with_vision(decoder_model(config), tower)
    tokenizer = with_picture_form(character_tokenizer("ab"), picture_form(model.config))
    save(tmp_path / "new", model, model.init(torch.Generator().manual_seed(0)), tokenizer)
    assert json.loads((tmp_path / "new" / PROCESSOR).read_text())["processor_class"] == "Qwen3VLProcessor"
    assert_read_alike(tmp_path / "new", tokenizer)
    assert picture_form(model.config, str(tmp_path / "new")) == picture_form_of(tokenizer)
