"""Gemma 4 against transformers: random configurations, gradients, directories with towers, and refused fields."""

import json
import random

import pytest
import torch
import transformers
from family_configs import GEMMA4
from hf_peers import (
    SMALL,
    assert_logits_and_files,
    greedy,
    greedy_of,
    logits_of,
    peer_of,
    random_weights,
    tokens_of,
)
from safetensors.torch import load_file, save_file
from selection import quick

from funrl import trees
from funrl.mesh.mesh import SINGLE
from funrl.models import Inputs, ModelError
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.left_out import remarks_on_files

DRAWS, QUICK = 6, 1
FULL, SLIDING = "full_attention", "sliding_attention"


def drawn_gemma4(number):
    """A configuration, as transformers takes it; all choices follow from a number."""
    pick = random.Random(number)
    heads = pick.choice([2, 3, 4, 6])
    divisors = [k for k in (1, 2, 3, heads) if heads % k == 0]
    layers = pick.choice([3, 4, 5, 6])
    kinds = [pick.choice([SLIDING, FULL]) for _ in range(layers - 1)] + [FULL]
    vectors = pick.choice([0, 6, 12])
    shared = 0
    if vectors:  # without vectors transformers fails where layers share keys
        shared = pick.choice([n for n in range(layers) if set(kinds[: layers - n]) == set(kinds)])
    vocab = pick.choice([37, 101, 128])
    turning = pick.choice([0.25, 0.5, 1.0])
    raw = {
        "model_type": "gemma4_text",
        "vocab_size": vocab,
        "vocab_size_per_layer_input": vocab,
        "hidden_size": heads * pick.choice([8, 12, 16]),
        "intermediate_size": pick.choice([24, 40, 56]),
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "num_attention_heads": heads,
        "num_key_value_heads": pick.choice(divisors),
        "num_global_key_value_heads": pick.choice([None, *divisors]),
        "head_dim": pick.choice([8, 12, 16]),
        "global_head_dim": pick.choice([8, 16, 24]),
        "attention_k_eq_v": pick.random() < 0.5,
        "attention_bias": pick.random() < 0.3,
        "sliding_window": pick.choice([2, 5, 17]),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": pick.random() < 0.5,
        "hidden_size_per_layer_input": vectors,
        "rms_norm_eps": pick.choice([1e-5, 1e-6, 1e-3]),
        "tie_word_embeddings": pick.random() < 0.5,
        "final_logit_softcapping": pick.choice([None, 1.5, 30.0]),
        "max_position_embeddings": 256,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": pick.choice([300.0, 1e4])},
            FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": turning},
        },
    }
    if pick.random() < 0.5:
        count = pick.choice([4, 6])
        raw |= {
            "enable_moe_block": True,
            "num_experts": count,
            "top_k_experts": pick.choice([1, 2, count]),
            "moe_intermediate_size": pick.choice([16, 24]),
        }
    return raw


@pytest.mark.parametrize("number", quick(range(DRAWS), range(QUICK)))
def test_a_drawn_gemma4(number, tmp_path):
    peer = peer_of(drawn_gemma4(number), tmp_path / "theirs")
    model, params = assert_logits_and_files(peer, tmp_path)
    begins_BS = tokens_of(model.config)[:2, :9]
    assert torch.equal(greedy(model, params, begins_BS, 8), greedy_of(peer, begins_BS, 8))


@pytest.mark.parametrize("name", quick(["gemma4 vectors", "gemma4 experts"], ["gemma4 vectors"]))
def test_gradients_equal_those_of_transformers(name, tmp_path):
    peer = peer_of(GEMMA4[name], tmp_path)
    model, params = hf.load(tmp_path)
    tokens_BT = tokens_of(model.config, rows=2, length=20)
    loss = peer(tokens_BT).logits.square().mean()
    loss.backward()
    (own, _), grads = trees.value_and_grad(lambda p: (logits_of(model, p, tokens_BT).square().mean(), None))(params)
    assert abs(own - loss) < 1e-5 * loss
    theirs = {key: x.grad for key, x in peer.named_parameters()}
    names = hf.names_of(model)
    compared = 0
    for key, x in trees.named(grads):
        there = names[key][0]
        if there in theirs:
            compared += 1
            assert (x.reshape(theirs[there].shape) - theirs[there]).norm() <= 1e-4 * theirs[there].norm(), key
    assert compared > 40 and not any(x.any() for key, x in trees.named(grads) if key.endswith("layer_scale"))


def test_16_bits_are_as_good_as_those_of_transformers(tmp_path):
    for name in ("gemma4 vectors", "gemma4 experts"):
        peer = peer_of(GEMMA4[name], tmp_path / name)
        low = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16).eval()
        model, params = hf.load(tmp_path / name, torch.bfloat16)
        tokens_BT = tokens_of(model.config)
        with torch.no_grad():
            hidden, theirs = model.apply(params, Inputs(tokens_BT)).hidden, low.model(tokens_BT).last_hidden_state
            exact = peer.model(tokens_BT).last_hidden_state
        assert hidden.dtype == torch.bfloat16
        assert (hidden.float() - exact).norm() < max(0.03 * exact.norm(), 1.2 * (theirs.float() - exact).norm())


@pytest.mark.parametrize("name", quick(["gemma4 vectors", "gemma4 experts"], ["gemma4 vectors"]))
def test_the_text_part_of_a_directory_with_towers_is_read_and_saved_alone(name, tmp_path):
    torch.manual_seed(0)
    text = {key: x for key, x in (SMALL | GEMMA4[name]).items() if key != "model_type"}
    tower = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "patch_size": 4,
        "position_embedding_size": 16,
    }
    config = transformers.AutoConfig.for_model("gemma4", text_config=text, vision_config=tower, image_token_id=90)
    peer = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    random_weights(peer.model.language_model)
    peer.eval().save_pretrained(tmp_path / "whole")
    file = tmp_path / "whole" / "model.safetensors"
    if name == "gemma4 vectors":  # published files have what layers that borrow keys do not use
        unused = "model.language_model.layers.3.self_attn.k_proj.weight"
        save_file(load_file(file) | {unused: torch.ones(24, 48)}, file)
    model, params = hf.load(tmp_path / "whole")
    tokens_BT = tokens_of(model.config) % 80 + 1
    with torch.no_grad():
        expected = peer(tokens_BT).logits
        hidden = model.apply(params, Inputs(tokens_BT)).hidden
    logits = hidden @ model.unembed(params).T
    cap = model.config.scales.logit_cap
    assert ((logits if cap is None else cap * (logits / cap).tanh()) - expected).abs().max() < 2e-5
    (remark,) = remarks_on_files(tmp_path / "whole", model)
    assert remark.startswith("the vision tower of the files, ") and "saved, as a gemma4_text" in remark
    hf.save(tmp_path / "text", model, params)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
    assert type(again).__name__ == "Gemma4ForCausalLM"
    with torch.no_grad():
        assert torch.equal(again(tokens_BT).logits, expected)


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SHARED = {"hidden_size_per_layer_input": 256, "sliding_window": 512}
LARGE = {
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "use_bidirectional_attention": "vision",
    "sliding_window": 1024,
}
MOE = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
# of published models the text part: numbers in all, met by a token and cached for it, sizes, layers of a period
PUBLISHED = {
    "E2B": (
        4_628_569_379,
        2_279_759_139,
        9_216,
        (1536, 6144, 35, 8, 1),
        5,
        SHARED
        | {
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
        },
    ),
    "E4B": (7_463_013_418, 4_644_441_130, 28_672, (2560, 10240, 42, 8, 2), 6, SHARED | {"num_kv_shared_layers": 18}),
    "26B-A4B": (
        25_233_141_790,
        3_822_530_590,
        112_640,
        (2816, 2112, 30, 16, 8),
        6,
        LARGE
        | MOE
        | {
            "num_global_key_value_heads": 2,
        },
    ),
    "31B": (
        30_697_345_340,
        30_697_345_340,
        450_560,
        (5376, 21504, 60, 32, 16),
        6,
        LARGE
        | {
            "num_global_key_value_heads": 4,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_have_their_numbers_of_parameters_and_of_what_is_cached(name, tmp_path):
    parameters, used, cached, sizes, period, fields = PUBLISHED[name]
    text = dict.fromkeys(("num_experts", "top_k_experts", "moe_intermediate_size", "num_global_key_value_heads"))
    text |= {"model_type": "gemma4_text", "final_logit_softcapping": 30.0, "vocab_size": 262144, "rms_norm_eps": 1e-6}
    text |= dict(zip(SIZES, sizes, strict=True)) | fields
    text["layer_types"] = ([SLIDING] * (period - 1) + [FULL]) * (sizes[2] // period)
    raw = {"model_type": "gemma4", "text_config": text, "vision_config": {}, "audio_config": None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = hf.load_model(tmp_path)
    cost = model.abilities.cost
    assert (trees.count(model.shapes), cost.used_parameters(parameters), cost.cached()) == (parameters, used, cached)
    assert trees.count(model.init_cache(SINGLE, 1, 1, torch.bfloat16, torch.device("meta"))) == cached


@pytest.mark.parametrize("code", ["native", "hf", "auto"])
def test_gemma3n_is_refused_by_name(code, tmp_path):
    small = {key: x for key, x in SMALL.items() if key != "num_hidden_layers"}
    config = transformers.AutoConfig.for_model("gemma3n_text", **small, num_hidden_layers=5, num_kv_shared_layers=0)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    with pytest.raises(ModelError, match=r"model_type is 'gemma3n_text', .*AltUp.*take a gemma4_text or gemma3_text"):
        hf.load_model(tmp_path, code)


@pytest.mark.parametrize(
    "name,change,message",
    [
        ("gemma4", {"hidden_activation": "relu"}, "hidden_activation is 'relu', supported is 'gelu_pytorch_tanh'"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ("gemma4", {"num_global_key_value_heads": 4}, "layer 1 has 4 heads of keys, which do not divide"),
        ("gemma4", {"global_head_dim": 9}, "head_dim of layer 1 is 9, it must be an even number"),
        ("gemma4", {"per_layer_config": {"2": {"sliding_window": 4}}}, "per_layer_config has sliding_window=4 for lay"),
        ("gemma4", {"rope_parameters": {FULL: {"rope_theta": 1.0}}}, "rope_parameters.sliding_attention.rope_theta is"),
        (
            "gemma4",
            {"rope_parameters": {kind: {"rope_type": "yarn", "rope_theta": 1.0} for kind in (FULL, SLIDING)}},
            "rope_parameters is .*Missing required keys in `rope_parameters` for 'rope_type'='yarn'",
        ),
        ("gemma4 vectors", {"vocab_size_per_layer_input": 90}, "vocab_size_per_layer_input is 90, it must be vocab_"),
        ("gemma4 vectors", {"num_kv_shared_layers": 3}, "no layer before the last 3 is of 'full_attention'"),
        ("gemma4 experts", {"top_k_experts": None}, "top_k_experts is None, it must be a whole number"),
    ],
)
def test_what_is_not_supported_is_named(name, change, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL | GEMMA4[name] | change))
    with pytest.raises(ModelError, match=message):
        hf.load_model(tmp_path)
