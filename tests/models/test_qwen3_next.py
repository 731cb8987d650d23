"""Qwen3-Next against transformers: gated delta nets between layers of gated attention, with experts."""

import json

import pytest
import torch
import transformers
from hf_peers import SMALL, assert_logits_and_files, logits_of, peer_of, tokens_of
from safetensors.torch import load_file, save_file

from funrl import trees
from funrl.batch import Batch
from funrl.models import Inputs, ModelError, place
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.config import config_from_hf, config_to_hf
from funrl.models.huggingface.left_out import remarks_on_files
from funrl.rollout.engine import complete
from funrl.rollout.native.engine import native_engine
from funrl.rollout.requests import requests_of
from funrl.rollout.sampling_parameters import Sampling

NEXT = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention"] * 2 + ["full_attention"],
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
CONFIGS = {
    "in turn": NEXT | {"num_hidden_layers": 4, "layer_types": None},
    "equal heads": NEXT
    | {
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_conv_kernel_dim": 3,
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "stretched": NEXT
    | {
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "decoder_sparse_step": 2,
        "linear_value_head_dim": 12,
        "rms_norm_eps": 1e-4,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4, "partial_rotary_factor": 0.5},
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_round_trip(name, tmp_path):
    assert_logits_and_files(peer_of(CONFIGS[name], tmp_path / "theirs"), tmp_path)
    theirs, ours = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "ours"))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(ours[key], x) for key, x in theirs.items())


@pytest.mark.parametrize("name", CONFIGS)
def test_config_round_trip_through_transformers(name):
    raw = {key: value for key, value in (SMALL | CONFIGS[name]).items() if value is not None}
    config = config_from_hf(raw)
    assert config_from_hf(config_to_hf(config)) == config
    theirs = transformers.AutoConfig.for_model(**raw).to_dict()  # every field, as transformers 5 does
    assert config_from_hf(theirs) == config


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_completions_are_those_of_transformers(name, tmp_path):
    peer = peer_of(CONFIGS[name], tmp_path)
    model, params = hf.load(tmp_path)
    engine = native_engine(model)
    engine.load(engine.weights.named(params), 0)
    prompts = [[1, 2, 3], [7, 9], tokens_of(model.config)[0].tolist()]  # of one token its cache has another state
    done = complete(engine, requests_of(prompts, Sampling(greedy=True, max_new_tokens=12), seed=0))
    for prompt, completion in zip(prompts, done, strict=True):
        with torch.no_grad():
            theirs = peer.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=12, min_new_tokens=12, pad_token_id=0
            )
        assert completion.tokens.tolist() == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side, tmp_path):
    peer = peer_of(NEXT, tmp_path)
    model, params = hf.load(tmp_path)
    tokens_BT = tokens_of(model.config)
    real_BT = torch.arange(40) < torch.tensor([[40], [23], [1]])
    real_BT = real_BT.flip(1) if side == "left" else real_BT
    positions_BT = (real_BT.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = peer(tokens_BT, attention_mask=real_BT.long(), position_ids=positions_BT).logits
        hidden = model.apply(params, Inputs(tokens_BT, positions_BT, real_BT.long())).hidden
    assert (hidden @ model.unembed(params).T - expected)[real_BT].abs().max() < 2e-5


def test_packed_rows_and_scores_equal_the_peer(tmp_path):
    peer = peer_of(NEXT, tmp_path)
    model, params = hf.load(tmp_path)
    rows = [row[:length] for row, length in zip(tokens_of(model.config), (13, 40, 1), strict=True)]
    lengths = torch.tensor([len(row) for row in rows])
    padding = torch.zeros(10, dtype=torch.int64)  # behind the last sequence
    offsets = torch.tensor([0, *lengths, 0]).cumsum(0).int()
    batch = Batch(
        tokens=torch.cat([*rows, padding])[None],
        mask=None,
        positions=torch.cat([*map(torch.arange, lengths), padding])[None],
        segments=torch.cat([torch.repeat_interleave(torch.arange(1, 4), lengths), padding])[None],
        offsets=offsets,
    )
    with torch.no_grad():
        scores = place(model).token_scores(params, batch, ("logp", "entropy"), 0.7)
    for row, begin in zip(rows, offsets.tolist(), strict=False):
        with torch.no_grad():
            logp = (peer(row[None]).logits[0, :-1] / 0.7).log_softmax(-1)
        inside = slice(begin + 1, begin + len(row))
        assert torch.allclose(scores.logp[0, inside], logp.gather(1, row[1:, None])[:, 0], rtol=0, atol=3e-5)
        assert torch.allclose(scores.entropy[0, inside], -(logp.exp() * logp).sum(-1), rtol=0, atol=3e-5)


def test_gradients_equal_the_peers(tmp_path):
    """Weights that a key head's value heads share, and those of the convolution, come from the right rows of files."""
    peer = peer_of(NEXT, tmp_path)
    model, params = hf.load(tmp_path)
    tokens_BT = tokens_of(model.config, rows=2, length=20)
    loss = peer(tokens_BT).logits.square().mean()
    loss.backward()

    def own_loss(params):
        return logits_of(model, params, tokens_BT).square().mean(), None

    (own, _), grads = trees.value_and_grad(own_loss)(params)
    assert abs(own - loss) < 1e-5 * loss
    named = dict(trees.named(grads))
    first = peer.model.layers[0].linear_attn
    own_filters = torch.cat([named[f"layers/0/attn/conv_{part}"].flatten(0, 1) for part in "qkv"])
    pairs = [(own_filters, first.conv1d.weight), (named["layers/0/attn/qkvz"].flatten(0, 1), first.in_proj_qkvz.weight)]
    pairs += [(named["layers/0/attn/ba"].flatten(0, 1), first.in_proj_ba.weight)]
    pairs += [(named["layers/0/attn/a_log"], first.A_log), (named["layers/0/attn/dt_bias"], first.dt_bias)]
    for own, theirs in pairs:
        assert (own - theirs.grad).norm() < 1e-4 * theirs.grad.norm()


def test_16_bits_follow_transformers(tmp_path):
    peer_of(NEXT, tmp_path)
    low = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    model, params = hf.load(tmp_path, torch.bfloat16)
    tokens_BT = tokens_of(model.config)
    with torch.no_grad():
        hidden = model.apply(params, Inputs(tokens_BT)).hidden
        expected = low.model(tokens_BT).last_hidden_state
    assert hidden.dtype == torch.bfloat16
    assert (hidden.float() - expected.float()).norm() < 0.03 * expected.float().norm()


def test_tensors_that_predict_further_tokens_are_left_out(tmp_path):
    peer_of(NEXT, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    model = hf.check_directory(tmp_path)
    assert not remarks_on_files(tmp_path, model)
    further = {f"mtp.{name}.weight": torch.zeros(2) for name in ("fc", "norm", "layers.0.mlp.gate")}
    save_file(tensors | further, tmp_path / "model.safetensors")
    hf.check_directory(tmp_path)
    assert remarks_on_files(tmp_path, model)[0].startswith("1 multi-token-prediction layer of the files is not trained")


@pytest.mark.parametrize(
    "change,message",
    [
        (
            {"layer_types": ["linear_attention", "chunked_attention", "full_attention"]},
            "layer_types has .chunked_attention.",
        ),
        ({"linear_num_value_heads": 3}, "value_heads is 3, it must be a multiple of key_heads, 2"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0, it must be a whole number of at least 1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_what_is_not_supported_is_named(change, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL | NEXT | change))
    with pytest.raises(ModelError, match=message):
        hf.load_model(tmp_path)
