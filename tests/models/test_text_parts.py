"""Text parts of directories of Qwen3.5 with a vision tower, against transformers."""

import json

import pytest
import torch
import transformers
from family_configs import DELTA_NETS
from hf_peers import SMALL, logits_of, random_weights, tokens_of
from safetensors.torch import load_file, save_file
from selection import quick

from funrl import trees
from funrl.data.pictures import picture_form
from funrl.models.errors import ModelError
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.left_out import remarks_on_files
from funrl.models.huggingface.peft_files import projections

TOWER = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": SMALL["hidden_size"],
    "num_position_embeddings": 16,
    "patch_size": 4,
}


def whole_model_of(name, folder):
    """A random model of transformers with a vision tower, saved to a folder."""
    torch.manual_seed(0)
    text = SMALL | DELTA_NETS[name]
    family = text.pop("model_type").removesuffix("_text")
    tied = text.get("tie_word_embeddings", False)
    config = transformers.AutoConfig.for_model(
        family, text_config=text, vision_config=TOWER, tie_word_embeddings=tied, image_token_id=90
    )
    peer = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    random_weights(peer.model.language_model)
    peer.eval().save_pretrained(folder)
    return peer


@pytest.mark.parametrize("name", quick(DELTA_NETS, ["qwen3_5_moe", "qwen3_5 in turn"]))
def test_the_text_part_has_the_logits_of_the_whole_model_and_is_saved_alone(name, tmp_path):
    peer = whole_model_of(name, tmp_path / "whole")
    model, params = hf.load(tmp_path / "whole")
    tokens_BT = tokens_of(model.config)
    with torch.no_grad():
        expected = peer(tokens_BT).logits
    assert (logits_of(model, params, tokens_BT) - expected).abs().max() < 2e-5
    (remark,) = remarks_on_files(tmp_path / "whole", model)
    towers = [key for key in load_file(tmp_path / "whole" / "model.safetensors") if key.startswith("model.visual.")]
    assert remark.startswith(f"the vision tower of the files, {len(towers)} tensors, is not read")
    assert picture_form(model.config, str(tmp_path / "whole")) is None  # by which records with pictures are refused
    hf.save(tmp_path / "text", model, params)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
    assert type(again).__name__ == json.loads((tmp_path / "text" / "config.json").read_text())["architectures"][0]
    assert again.config.model_type == f"{peer.config.model_type}_text"
    with torch.no_grad():
        assert torch.equal(again(tokens_BT).logits, expected)
    model_again, params_again = hf.load(tmp_path / "text")
    assert not remarks_on_files(tmp_path / "text", model_again)
    assert model_again.config == model.config and projections(model_again) == projections(model)
    assert all(torch.equal(a, b) for a, b in zip(trees.leaves(params), trees.leaves(params_again), strict=True))


@pytest.mark.parametrize("inner", [24, 48])  # 48: a matrix of downs is square
def test_all_experts_of_a_layer_may_be_one_tensor(inner, tmp_path, monkeypatch):
    monkeypatch.setitem(DELTA_NETS, "qwen3_5_moe", DELTA_NETS["qwen3_5_moe"] | {"moe_intermediate_size": inner})
    peer = whole_model_of("qwen3_5_moe", tmp_path)
    _, params = hf.load(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    rest = {name: x for name, x in tensors.items() if ".experts." not in name}
    joint = {name: x for name, x in peer.state_dict().items() if ".experts." in name}
    assert len(joint) == 6
    save_file(rest | joint, tmp_path / "model.safetensors")
    _, params_of_joint = hf.load(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(trees.leaves(params), trees.leaves(params_of_joint), strict=True))
    name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    save_file(rest | joint | {name: joint[name][:, 1:].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{name} has shape \[4, {2 * inner - 1}, 48\]"):
        hf.check_directory(tmp_path)


def test_what_is_wrong_is_named(tmp_path):
    whole_model_of("qwen3_5", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    save_file({key: x for key, x in tensors.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"1 tensors are missing, the first is {name}"):
        hf.check_directory(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    for text, message in (
        ([1], r"text_config is \[1\], it must be an object"),
        (raw["text_config"] | {"head_dim": 0}, "head_dim is 0, it must be a whole number of at least 1"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(raw | {"text_config": text}))
        with pytest.raises(ModelError, match=message):
            hf.load_model(tmp_path)
