"""Hugging Face directories: what is refused, sharded files, a rank's own slice."""

import json
import os
import types

import pytest
import torch
from dense_models import every_bias
from own_parts import own_part
from safetensors.torch import load_file, save_file

from funrl import trees
from funrl.mesh import mesh as meshes
from funrl.mesh import rules
from funrl.mesh.mesh import Mesh
from funrl.models import ModelError, decoder_config, decoder_model, load_model, with_fields, with_value_head
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface import weight_slices
from funrl.models.huggingface.weight_files import INDEX
from funrl.trainer.settings.settings import settings_of

MODEL = every_bias(eos=(2, 3))
CONFIG = MODEL.config


@pytest.fixture
def params():
    return MODEL.init(torch.Generator().manual_seed(0))


def test_sharded_and_whole_files_hold_the_same(tmp_path, params):
    hf.save(tmp_path / "whole", MODEL, params)
    hf.save(tmp_path / "parts", MODEL, params, max_shard_bytes=4000)
    assert len(list((tmp_path / "parts").glob("model-*-of-*.safetensors"))) > 3
    assert [f.name for f in (tmp_path / "whole").iterdir() if f.name.startswith("model")] == ["model.safetensors"]
    for folder in ("whole", "parts"):
        model, loaded = hf.load(tmp_path / folder)
        assert model.config == CONFIG == hf.check_directory(tmp_path / folder).config
        assert all(torch.equal(a, b) for a, b in zip(trees.leaves(loaded), trees.leaves(params), strict=True))


def test_saving_again_leaves_no_stale_weights(tmp_path, params):
    hf.save(tmp_path, MODEL, params)
    hf.save(tmp_path, MODEL, trees.map(lambda x: x + 1, params), max_shard_bytes=4000)
    assert not (tmp_path / "model.safetensors").exists()
    assert torch.equal(hf.load(tmp_path)[1]["norm"], params["norm"] + 1)
    hf.save(tmp_path, MODEL, trees.cast(params, torch.bfloat16))
    assert sorted(f.name for f in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    model, loaded = hf.load(tmp_path)
    assert model.config.source.dtype == "bfloat16" and loaded["norm"].dtype == torch.bfloat16


@pytest.mark.parametrize("text", ["tp2", "dp2,tp4"])
def test_a_rank_reads_its_own_slice(tmp_path, params, text):
    model = every_bias(vocab=32)
    params = model.init(torch.Generator().manual_seed(0))
    hf.save(tmp_path, model, params, max_shard_bytes=4000)
    sizes = meshes.parse(text)
    layouts = rules.layouts(model.shapes, model.axes, rules.STORED, sizes)
    # As if the weights were split everywhere they can be: over the head dim and the model dim too.
    everywhere = dict(rules.STORED) | {"heads": None, "kv_heads": None, "head": "data", "mlp": None, "embed": "tensor"}
    everywhere["vocab"] = "data"
    more = rules.layouts(model.shapes, model.axes, everywhere, sizes)
    for rank in range(Mesh(sizes).world):
        mesh = Mesh(sizes, rank=rank)
        for tree in (layouts, more):
            local = own_part(tmp_path, model, torch.float32, tree, rank)
            expected = rules.shard(params, tree, mesh)
            assert all(torch.equal(a, b) for a, b in zip(trees.leaves(local), trees.leaves(expected), strict=True))


def _edit_config(folder, **change):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | change))


def _edit_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def _cut(file, size):
    with file.open("r+b") as stream:
        stream.truncate(size)


BROKEN = {
    "no config": (lambda d: (d / "config.json").unlink(), "config.json is missing"),
    "config not json": (lambda d: (d / "config.json").write_text("{"), "config.json is not JSON"),
    "config a list": (lambda d: (d / "config.json").write_text("[]"), "config.json holds a list"),
    "unknown": (lambda d: _edit_config(d, model_type="mamba"), "config.json: model_type is 'mamba'"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "cut": (lambda d: _cut(d / "model.safetensors", 9000), "it is cut short or damaged"),
    "cut by a byte": (
        lambda d: _cut(d / "model.safetensors", (d / "model.safetensors").stat().st_size - 1),
        "cut short or damaged",
    ),
    "cut in the table": (lambda d: _cut(d / "model.safetensors", 100), "it is cut short"),
    "no bytes": (lambda d: _cut(d / "model.safetensors", 0), "model.safetensors: it is cut short or damaged"),
    "not safetensors": (
        lambda d: (d / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"abcd"),
        "it is cut short or damaged",
    ),
    "missing tensor": (lambda d: _edit_weights(d, lambda t: t.pop("model.norm.weight")), "missing.*model.norm.weight"),
    "extra tensor": (
        lambda d: _edit_weights(d, lambda t: t.update({"model.layers.0.extra": torch.zeros(1)})),
        "no place in a Qwen3ForCausalLM.*model.layers.0.extra",
    ),
    "shape": (lambda d: _edit_config(d, intermediate_size=25), r"shape \[16, 24\], config.json says \[16, 25\]"),
    "dtype": (
        lambda d: _edit_weights(d, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.int8)})),
        "model.norm.weight has dtype I8",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_directories_are_refused(tmp_path, params, case):
    hf.save(tmp_path, MODEL, params)
    breaks, message = BROKEN[case]
    breaks(tmp_path)
    for read in (hf.check_directory, hf.load):
        with pytest.raises(ModelError, match=message):
            read(tmp_path)


def test_missing_and_empty_directories(tmp_path):
    with pytest.raises(ModelError, match="is not a directory"):
        hf.check_directory(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="is empty"):
        hf.check_directory(tmp_path)


def test_files_can_be_read_by_whom_the_umask_lets(tmp_path, params):
    before = os.umask(0o027)
    try:
        hf.save(tmp_path, MODEL, params, max_shard_bytes=2000)
    finally:
        os.umask(before)
    assert len(list(tmp_path.iterdir())) > 3
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o640}


@pytest.mark.parametrize(
    "own, padding, reads, saved", [(None, 7, False, 7), (3, 7, False, 3), (3, 7, True, 7), (3, None, True, 3)]
)
def test_the_padding_token_is_written(own, padding, reads, saved, tmp_path):
    """The model's own, or the tokenizer's; that of a reward model says where a text ends, so the tokenizer's."""
    tokenizer = types.SimpleNamespace(pad_token_id=padding, save_pretrained=lambda folder: None)
    model = decoder_model(with_fields(CONFIG, pad=own))
    model = with_value_head(model) if reads else model
    hf.save(tmp_path, model, model.init(torch.Generator().manual_seed(0)), tokenizer)
    assert json.loads((tmp_path / "config.json").read_text())["pad_token_id"] == saved


def test_index_naming_what_is_not_there(tmp_path, params):
    hf.save(tmp_path, MODEL, params, max_shard_bytes=4000)
    index = json.loads((tmp_path / INDEX).read_text())
    first = sorted(set(index["weight_map"].values()))[0]
    moved = index | {"weight_map": index["weight_map"] | {"model.norm.weight": first}}
    (tmp_path / INDEX).write_text(json.dumps(moved))
    with pytest.raises(ModelError, match=f"{first} lacks model.norm.weight"):
        hf.check_directory(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps(index))
    (tmp_path / first).unlink()
    with pytest.raises(ModelError, match=f"{first} is missing; {INDEX} names it"):
        hf.check_directory(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(ModelError, match="has no weight_map"):
        hf.check_directory(tmp_path)


def test_a_second_copy_of_tied_embeddings_is_ignored(tmp_path):
    config = decoder_config(vocab=31, embed=16, layers=1, heads=4, kv_heads=2, head=4, mlp=24, tied=True)
    model = decoder_model(config)
    params = model.init(torch.Generator().manual_seed(0))
    hf.save(tmp_path, model, params)
    _edit_weights(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert hf.check_directory(tmp_path).config == config
    assert "unembed" not in hf.load(tmp_path)[1]


def test_check_reads_no_weights(tmp_path, params, monkeypatch):
    hf.save(tmp_path, MODEL, params, max_shard_bytes=4000)

    def refuse(*args, **kwargs):
        raise AssertionError("a file of weights was opened")

    monkeypatch.setattr(weight_slices, "safe_open", refuse)
    assert hf.check_directory(tmp_path).config == CONFIG
    with pytest.raises(AssertionError, match="was opened"):
        hf.load(tmp_path)


def test_a_model_without_its_weights(tmp_path, params):
    hf.save(tmp_path, MODEL, params)
    (tmp_path / "model.safetensors").unlink()
    for path in (tmp_path, tmp_path / "config.json"):
        assert load_model(path).config == CONFIG
    with pytest.raises(ModelError, match="is not a directory"):
        load_model(tmp_path / "nowhere")


def test_a_name_in_the_local_cache_opens_like_a_directory(tmp_path, params, monkeypatch):
    from huggingface_hub import constants

    from funrl.algos.recipes import recipe
    from funrl.cost.dry_run import plain_job

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    hf.save(snapshot, MODEL, params)
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("0" * 40)
    assert hf.find_directory("some/model") == snapshot
    assert hf.check_directory(hf.find_directory("some/model")).config == CONFIG
    job = plain_job(settings_of(model="some/model"), recipe("grpo")(), 1e12)
    assert job.settings.models.model == str(snapshot) and job.model.config == CONFIG
    for unknown in ("some/other", "no such model"):
        assert str(hf.find_directory(unknown)) == unknown
        with pytest.raises(
            ModelError, match="not a directory, nor the name of a model in the local Hugging Face cache"
        ):
            hf.check_directory(hf.find_directory(unknown))


def test_a_classifier_with_more_labels_is_refused(tmp_path, params):
    hf.save(tmp_path, MODEL, params)
    for labels in ({}, {"num_labels": 3}, {"id2label": {"0": "a", "1": "b", "2": "c"}}):
        count = 3 if labels else 2
        _edit_config(tmp_path, architectures=["Qwen3ForSequenceClassification"], **labels)
        with pytest.raises(ModelError, match=f"Qwen3ForSequenceClassification has {count} labels, supported is one"):
            load_model(tmp_path)
