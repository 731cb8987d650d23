"""Adapters in PEFT's format: what is in the files, and what PEFT computes with them."""

import json

import pytest
import torch
import transformers
from hf_peers import logits_of, peer_of, random_weights, tokens_of
from safetensors.torch import load_file
from tiny_vl import picture_batch, rows_of, saved_model, transformers_logits

from funrl import trees
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.peft_files import targets_of, write_peft
from funrl.models.lora import on_base, trained_part, with_lora
from funrl.models.model import Inputs, Lora
from funrl.models.placed import inputs_of
from funrl.models.vision.inputs import picture_inputs

CASES = {  # config.json, targets
    "llama": ({"model_type": "llama", "attention_bias": True}, "all-linear"),
    "qwen3": ({"model_type": "qwen3", "head_dim": 20, "tie_word_embeddings": True}, "q_proj,down_proj"),
    "phi3": ({"model_type": "phi3"}, "all-linear"),
    "phi3 in part": ({"model_type": "phi3"}, "k_proj,o_proj,up_proj"),
}


def adapted(folder, targets, rank=3):
    """A model of a directory with random adapters, the whole tree, and what learns by name."""
    plain, base = hf.load(folder / "base", torch.float32)
    model = with_lora(plain, Lora(rank, 5.0, targets_of(targets, plain)))
    generator = torch.Generator().manual_seed(3)
    own = trees.map(lambda x: torch.randn(x.shape, generator=generator) / 5, trained_part(model, model.shapes))
    decoder = base.get("decoder", base)
    write_peft(folder / "adapter", model, dict(trees.named(own)), folder / "base")
    return model, on_base(model, decoder, own), own


@pytest.mark.parametrize("case", CASES)
def test_peft_computes_the_same_logits(case, tmp_path):
    peft = pytest.importorskip("peft")
    raw, targets = CASES[case]
    base = peer_of(raw, tmp_path / "base")
    model, params, _ = adapted(tmp_path, targets)
    tokens_BT = tokens_of(model.config)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        ours, logits = logits_of(model, params, tokens_BT), theirs(tokens_BT).logits
        with theirs.disable_adapter():
            without = theirs(tokens_BT).logits
    assert (ours - logits).abs().max() < 2e-5 and (ours - without).abs().max() > 0.05
    merged = theirs.merge_and_unload()
    with torch.no_grad():
        assert (merged(tokens_BT).logits - ours).abs().max() < 2e-5


SEEING = {  # targets, and names in target_modules of what has adapters
    "qwen2_5_vl": ("q_proj,up_proj,vision", ["model.visual.merger.mlp.0", "qkv"], ["gate_proj"]),
    "qwen3_vl": ("all-linear,vision.qkv,vision.linear_fc1", ["linear_fc1", "qkv"], ["proj", "linear_fc2"]),
    "gemma3": ("v_proj,vision.v_proj,vision.fc2", ["fc2", "v_proj"], ["q_proj", "out_proj"]),
    "gemma3 without the tower": ("v_proj", ["model.language_model.layers.1.self_attn.v_proj"], ["v_proj", "fc2"]),
    "llava_onevision": ("up_proj,vision.fc1,vision.linear_1", ["fc1", "linear_1", "up_proj"], ["fc2"]),
}


@pytest.mark.parametrize("case", SEEING)
def test_peft_computes_the_same_logits_of_pictures(case, tmp_path):
    peft = pytest.importorskip("peft")
    family = case.split()[0]
    targets, named, unnamed = SEEING[case]
    base = saved_model(tmp_path / "base", family)
    model, params, _ = adapted(tmp_path, targets)
    tower = model.config.tower
    batch, lengths = picture_batch(tower, rows_of(family)[:1])
    inputs = picture_inputs(tower, batch, inputs_of(batch))
    ours = (model.apply(params, inputs).hidden @ model.unembed(params).T)[0]
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    raw = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert set(named) <= set(raw["target_modules"]) and not set(unnamed) & set(raw["target_modules"])
    there = {name for name, _ in theirs.named_parameters() if ".lora_" in name}
    assert len(there) == len(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    logits = transformers_logits(theirs, tower, batch, 0, lengths[0])
    with theirs.disable_adapter():
        without = transformers_logits(theirs, tower, batch, 0, lengths[0])
    assert (ours - logits).abs().max() < 2e-5 and (ours - without).abs().max() > 0.01


def test_peft_reads_a_reward_model(tmp_path):
    peft = pytest.importorskip("peft")
    raw = peer_of({"model_type": "llama"}).config.to_dict() | {"num_labels": 1, "architectures": ["x"]}
    config = transformers.LlamaConfig(**raw)
    torch.manual_seed(0)
    base = random_weights(transformers.LlamaForSequenceClassification(config))
    base.save_pretrained(tmp_path / "base")
    model, params, own = adapted(tmp_path, "q_proj,gate_proj")
    assert own["value"].shape == (1, model.config.embed)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    tokens_BT = tokens_of(model.config)
    with torch.no_grad():
        hidden = model.apply(params, Inputs(tokens_BT)).hidden[:, -1:]
        ours, value = model.value(params, hidden)[:, 0], theirs(tokens_BT).logits[:, 0]
    assert (ours - value).abs().max() < 2e-5 and ours.std() > 0.01


def test_what_is_in_the_files(tmp_path):
    peer_of({"model_type": "phi3"}, tmp_path / "base")
    model, _, own = adapted(tmp_path, "k_proj,o_proj", rank=3)
    raw = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (raw["r"], raw["lora_alpha"], raw["target_modules"]) == (3, 5.0, ["o_proj", "qkv_proj"])
    assert raw["rank_pattern"] == raw["alpha_pattern"] == {} and raw["base_model_name_or_path"] == str(
        tmp_path / "base"
    )
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    begin = "base_model.model.model.layers.0.self_attn."
    assert len(found) == 4 * model.config.layers
    b = found[begin + "qkv_proj.lora_B.weight"]  # 6 heads of queries, 2 of keys and 2 of values, of 8 each
    assert b.shape == (80, 3) and not b[:48].any() and not b[64:].any()
    assert torch.equal(b[48:64], own["layers"][0]["attn"]["k_lora_b"].flatten(0, 1))
    adapted(tmp_path, "all-linear")
    raw = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert raw["rank_pattern"] == {"gate_up_proj": 6, "qkv_proj": 9}
    assert raw["alpha_pattern"] == {"gate_up_proj": 10.0, "qkv_proj": 15.0}
