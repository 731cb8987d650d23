"""Adapters in PEFT's format: what is in the files, and what PEFT computes with them."""

import json
import re

import pytest
import torch
import transformers
from hf_peers import logits_of, peer_of, random_weights, tokens_of
from safetensors.torch import load_file, save_file
from tiny_vl import picture_batch, rows_of, saved_model, transformers_logits

from funrl import trees
from funrl.models.errors import ModelError
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.peft_files import describe_adapter, read_adapter, targets_of, write_peft
from funrl.models.lora import on_base, trained_part, with_lora
from funrl.models.model import Inputs, Lora
from funrl.models.placed import inputs_of
from funrl.models.vision.inputs import picture_inputs

pytestmark = pytest.mark.versions

OF_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
GATES = "router,experts.gate_up_proj"
CASES = {  # config.json, targets
    "llama": ({"model_type": "llama", "attention_bias": True}, "all-linear"),
    "qwen3": ({"model_type": "qwen3", "head_dim": 20, "tie_word_embeddings": True}, "q_proj,down_proj"),
    "phi3": ({"model_type": "phi3"}, "all-linear"),
    "phi3 in part": ({"model_type": "phi3"}, "k_proj,o_proj,up_proj"),
    "qwen3_moe": ({"model_type": "qwen3_moe", "num_experts": 4, **OF_EXPERTS}, "all-linear,experts,router"),
    "qwen3_moe, downs": ({"model_type": "qwen3_moe", "num_experts": 4, **OF_EXPERTS}, "q_proj,experts.down_proj"),
    "mixtral, gates": ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}, GATES),
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


def test_experts_whose_gates_and_ups_share_a_factor_are_read_as_peft_computes_them(tmp_path):
    peft = pytest.importorskip("peft")
    base = peer_of({"model_type": "qwen3_moe", "num_experts": 4, **OF_EXPERTS}, tmp_path / "base")
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
    theirs = peft.get_peft_model(
        base, peft.LoraConfig(r=2, lora_alpha=3, target_modules=[], target_parameters=names, init_lora_weights=False)
    ).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    described = describe_adapter(tmp_path / "adapter")
    assert described.modules == ("experts.down_proj", "experts.gate_up_proj", "router")
    plain, weights = hf.load(tmp_path / "base", torch.float32)
    model = with_lora(plain, Lora(described.rank, described.alpha, targets_of(",".join(described.modules), plain)))
    own = read_adapter(tmp_path / "adapter", model)
    params = on_base(model, weights, trees.from_named(trained_part(model, model.shapes), own.items()))
    tokens_BT = tokens_of(model.config)
    with torch.no_grad():
        ours, logits = logits_of(model, params, tokens_BT), theirs(tokens_BT).logits
    assert (ours - logits).abs().max() < 2e-5
    raw = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    raw["target_parameters"].append("mlp.experts.bias")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=r"target_parameters has 'mlp.experts.bias', supported are experts.gate_up"):
        describe_adapter(tmp_path / "adapter")


def test_what_is_in_the_files(tmp_path):
    peer_of({"model_type": "phi3"}, tmp_path / "base")
    model, _, own = adapted(tmp_path, "k_proj,o_proj", rank=3)
    raw = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (raw["r"], raw["lora_alpha"], raw["target_modules"]) == (3, 5.0, ["o_proj", "qkv_proj"])
    assert raw["rank_pattern"] == raw["alpha_pattern"] == {} and raw["base_model_name_or_path"] == str(
        tmp_path / "base"
    )
    file = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    begin = "base_model.model.model.layers.0.self_attn."
    assert len(file) == 4 * model.config.layers
    b = file[begin + "qkv_proj.lora_B.weight"]  # 6 heads of queries, 2 of keys and 2 of values, of 8 each
    assert b.shape == (80, 3) and not b[:48].any() and not b[64:].any()
    assert torch.equal(b[48:64], own["layers"][0]["attn"]["k_lora_b"].flatten(0, 1))
    adapted(tmp_path, "all-linear")
    raw = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert raw["rank_pattern"] == {"gate_up_proj": 6, "qkv_proj": 9}
    assert raw["alpha_pattern"] == {"gate_up_proj": 10.0, "qkv_proj": 15.0}


READ = CASES | {"phi3 two of three": ({"model_type": "phi3"}, "q_proj,v_proj,gate_proj")}


@pytest.mark.parametrize("case", READ)
def test_adapters_are_read_back(case, tmp_path):
    """Where a file holds several projections as one, those of them without adapters get some of product 0."""
    raw, targets = READ[case]
    peer_of(raw, tmp_path / "base")
    own = adapted(tmp_path, targets)[2]
    described = describe_adapter(tmp_path / "adapter")
    assert (described.base, described.rank, described.alpha) == (str(tmp_path / "base"), 3, 5.0)
    plain = hf.check_directory(tmp_path / "base")
    again = with_lora(plain, Lora(3, 5.0, targets_of(",".join(described.modules), plain)))
    adapter = read_adapter(tmp_path / "adapter", again)
    expected = dict(trees.named(own))
    assert expected.keys() <= adapter.keys()
    assert (expected.keys() == adapter.keys()) == (case not in ("phi3 in part", "phi3 two of three"))
    assert all(torch.equal(adapter[name], x) for name, x in expected.items())
    more = {name: x for name, x in adapter.items() if name not in expected}
    assert not any(x.any() for name, x in more.items() if name.endswith("_lora_b"))


@pytest.mark.parametrize("model_type", ["llama", "phi3"])
def test_an_adapter_of_peft_has_its_logits(model_type, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = peer_of({"model_type": model_type}, tmp_path / "base")
    given = peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", use_rslora=True, lora_dropout=0.1)
    theirs = peft.get_peft_model(base, given).eval()
    with torch.no_grad():
        for name, x in theirs.named_parameters():
            if "lora_" in name:
                x.normal_(0, 0.1)
    theirs.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "README.md").unlink(missing_ok=True)
    described = describe_adapter(tmp_path / "adapter")
    assert (described.rank, described.alpha, described.dropout) == (4, 12.0, 0.1)
    plain, weights = hf.load(tmp_path / "base")
    model = with_lora(plain, Lora(4, described.alpha, targets_of(",".join(described.modules), plain)))
    own = trees.from_named(trained_part(model, model.shapes), read_adapter(tmp_path / "adapter", model).items())
    tokens_BT = tokens_of(model.config)
    with torch.no_grad():
        ours, logits = logits_of(model, on_base(model, weights, own), tokens_BT), theirs(tokens_BT).logits
        with theirs.disable_adapter():
            assert (ours - theirs(tokens_BT).logits).abs().max() > 0.05
    assert (ours - logits).abs().max() < 2e-5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', supported is 'LORA'; merge it with peft's merge_and_unload"),
        ({"use_dora": True}, "use_dora is True, supported is False"),
        ({"alpha_pattern": {"q_proj": 9}}, "q_proj has alpha 9 and rank 3, other modules have 5.0 and 3"),
        ({"r": 0}, "r is 0 and lora_alpha 5.0, both must be above 0"),
    ],
)
def test_adapters_that_are_more_than_plain_ones_are_refused_by_name(change, says, tmp_path):
    peer_of({"model_type": "llama"}, tmp_path / "base")
    adapted(tmp_path, "q_proj")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelError, match=re.escape(says)):
        describe_adapter(tmp_path / "adapter")


def test_tensors_of_an_adapter_are_strict(tmp_path):
    peer_of({"model_type": "llama"}, tmp_path / "base")
    model, _, _ = adapted(tmp_path, "q_proj,v_proj")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight"
    changes = {
        "is missing; adapters of some layers alone": {key: x for key, x in tensors.items() if key != name},
        "1 tensors have no place in the model, the first is base_model.model.x": tensors
        | {"base_model.model.x": torch.ones(2)},
        "has shape [2], the model needs [3, 48]": tensors | {name: torch.ones(2)},
        "has numbers that are NaN or infinite": tensors | {name: tensors[name] / 0},
    }
    for says, changed in changes.items():
        save_file(changed, file)
        with pytest.raises(ModelError, match=re.escape(says)):
            read_adapter(tmp_path / "adapter", model)
    with pytest.raises(
        ModelError, match=re.escape(f"holds adapters alone, for the base {tmp_path / 'base'}; merge it")
    ):
        hf.check_directory(tmp_path / "adapter")
