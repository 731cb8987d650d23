"""Every family that is a switch of the decoder, against transformers: three random configurations each."""

import json
import subprocess
import sys

import pytest
import torch
import transformers
from family_configs import ALL
from hf_peers import SMALL, assert_peer, peer_of, random_weights, tokens_of
from own_parts import own_part
from selection import quick
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from funrl import trees
from funrl.batch import Batch
from funrl.compiled_kernels.decode_step import kernel_problem
from funrl.models import Inputs, ModelError, flat_fields, place
from funrl.models.decoder.compiled_step import step_sizes
from funrl.models.decoder.layers import Rope
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.config import check_config, config_from_hf, config_to_hf
from funrl.models.huggingface.configs.hf_family import fields_as_written, fields_with_defaults

CAPS = {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 1.5}
GEMMA = {"head_dim": 8, "sliding_window": 7, "hidden_activation": "gelu_pytorch_tanh"}
LINEAR = {"rope_type": "linear", "factor": 4.0}
CONFIGS = {
    "mistral window": {"model_type": "mistral", "sliding_window": 7, "head_dim": 20},
    "mistral no window": {"model_type": "mistral", "sliding_window": None, "num_key_value_heads": 6, "rope_theta": 1e6},
    "mistral tied": {
        "model_type": "mistral",
        "sliding_window": 9,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "phi3": {"model_type": "phi3", "num_key_value_heads": 6},
    "phi3 window": {"model_type": "phi3", "sliding_window": 7, "num_key_value_heads": 3},
    "phi3 tied": {"model_type": "phi3", "num_key_value_heads": 1, "tie_word_embeddings": True, "rms_norm_eps": 1e-4},
    "olmo2": {"model_type": "olmo2", "num_key_value_heads": 6},
    "olmo2 groups": {"model_type": "olmo2", "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "olmo2 bias tied": {"model_type": "olmo2", "attention_bias": True, "tie_word_embeddings": True},
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 4},
    "smollm3 window": {
        "model_type": "smollm3",
        "no_rope_layers": [1, 0, 0],
        "use_sliding_window": True,
        "sliding_window": 7,
    },
    "smollm3 bias": {
        "model_type": "smollm3",
        "no_rope_layer_interval": 2,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 3.0,
        "attention_multiplier": 0.2,
    },
    "granite bias": {
        "model_type": "granite",
        "embedding_multiplier": 1.7,
        "attention_multiplier": 0.125,
        "attention_bias": True,
    },
    "granite tied": {"model_type": "granite", "residual_multiplier": 0.5, "tie_word_embeddings": True},
    "gemma2": {"model_type": "gemma2", **GEMMA, **CAPS, "query_pre_attn_scalar": 12},
    "gemma2 no caps": {
        "model_type": "gemma2",
        **GEMMA,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "query_pre_attn_scalar": 8,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "gemma2 bias untied": {
        "model_type": "gemma2",
        **GEMMA,
        **CAPS,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "num_key_value_heads": 6,
    },
    "gemma3": {"model_type": "gemma3_text", **GEMMA, "sliding_window_pattern": 2, "query_pre_attn_scalar": 12},
    "gemma3 stretched": {
        "model_type": "gemma3_text",
        **GEMMA,
        "sliding_window_pattern": 3,
        "rope_parameters": {
            "full_attention": {**LINEAR, "rope_theta": 5e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    },
    "gemma3 cap": {
        "model_type": "gemma3_text",
        **GEMMA,
        "final_logit_softcapping": 1.5,
        "num_key_value_heads": 1,
        "rope_scaling": LINEAR,
        "sliding_window_pattern": 2,
    },
}
CAPPED = [name for name in CONFIGS if "softcapping" in str(CONFIGS[name])]


@pytest.mark.parametrize("name", quick(CONFIGS, ["mistral window", "olmo2 groups", "gemma3 stretched"]))
def test_logits_greedy_tokens_and_round_trip(name, tmp_path):
    assert_peer(CONFIGS[name], tmp_path, new_tokens=5)


@pytest.mark.parametrize("name", CONFIGS)
def test_config_round_trip_through_transformers(name):
    config = config_from_hf(SMALL | CONFIGS[name])
    assert config_from_hf(config_to_hf(config)) == config
    theirs = transformers.AutoConfig.for_model(**SMALL | CONFIGS[name]).to_dict()  # every field, as transformers 5 does
    assert config_from_hf(theirs) == config


ROPE_KINDS = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 0.7},
}


@pytest.mark.parametrize("kind", ROPE_KINDS)
@pytest.mark.parametrize("further", [{}, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}])
def test_a_llama_is_written_as_transformers_reads_it_without_its_defaults(kind, further):
    rope = {"rope_scaling": {"rope_type": kind, **ROPE_KINDS[kind]}} if ROPE_KINDS[kind] else {}
    config = config_from_hf(SMALL | {"model_type": "llama", "rope_theta": 500.0} | rope | further)
    raw = config_to_hf(config)
    assert config_from_hf(raw, fields_as_written) == config_from_hf(raw, fields_with_defaults) == config
    assert config_from_hf(raw) == config


@pytest.mark.parametrize("change", [{"tie_word_embeddings": "false"}, {"hidden_act": 3}, {"rms_norm_eps": "small"}])
def test_a_config_as_it_is_written_but_for_a_wrong_type_is_refused(change):
    raw = config_to_hf(config_from_hf(SMALL | {"model_type": "llama"})) | change
    with pytest.raises(ModelError, match=next(iter(change))):
        check_config(raw)


def test_a_run_of_the_embedded_task_loads_no_models_of_transformers():
    program = (
        "import sys; from funrl.tasks import arithmetic; from funrl.models.huggingface import config\n"
        "raw = config.config_to_hf(arithmetic.model_config()); config.check_config(raw); config.config_from_hf(raw)\n"
        "print([name for name in sys.modules if name == 'transformers'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "[]\n"


YARN = {"beta_slow": 1.0, "beta_fast": 32.0, "truncate": True}  # fields that vLLM's gpt_oss cannot do without
SET = [{}, {"truncate": False}, {"attention_factor": 1.3}, {"mscale": 1.0, "mscale_all_dim": 0.7}, {"beta_fast": 4.0}]


@pytest.mark.parametrize("fields", SET)
def test_a_saved_config_has_all_fields_of_yarn_and_the_rotations_of_transformers(fields, tmp_path):
    given = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32} | fields
    config = config_from_hf(SMALL | {"model_type": "llama", "head_dim": 16, "rope_scaling": given})
    raw = config_to_hf(config)
    assert raw["rope_scaling"] == YARN | given
    (tmp_path / "config.json").write_text(json.dumps(raw))
    peer = LlamaRotaryEmbedding(transformers.AutoConfig.from_pretrained(tmp_path))
    positions = torch.arange(200)
    rope = Rope(16, config.rope.theta, config.rope.scaling).rotations(positions, torch.float32)
    cos, sin = (x[0] for x in peer(torch.zeros(1), positions[None]))
    assert torch.allclose(rope.cos.flatten(1), cos, atol=2e-5)
    assert torch.allclose(rope.sin.flatten(1)[:, 8:], sin[:, 8:], atol=2e-5)


@pytest.mark.parametrize("name", ["olmo2 groups", "smollm3 window", "granite", *CAPPED])
def test_packed_rows_and_scores_equal_the_peer(name, tmp_path):
    """Variable-length attention and log-probabilities without logits, against whole rows and their logits."""
    peer = peer_of(CONFIGS[name], tmp_path)
    model, params = hf.load(tmp_path)
    rows = [row[:length] for row, length in zip(tokens_of(model.config), (13, 40, 27), strict=True)]
    tokens, lengths = torch.cat(rows)[None], torch.tensor([len(row) for row in rows])
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    segments = torch.repeat_interleave(torch.arange(1, 4), lengths)[None]
    batch = Batch(tokens=tokens, mask=None, positions=positions, segments=segments, offsets=offsets)
    with torch.no_grad():
        got = place(model).token_scores(params, batch, ("logp", "entropy"), 0.7)
        ids, top = place(model).topk(params, batch, 3, 0.7)
    for row, begin in zip(rows, offsets.tolist(), strict=False):
        with torch.no_grad():
            logp = (peer(row[None]).logits[0, :-1] / 0.7).log_softmax(-1)
        inside = slice(begin + 1, begin + len(row))
        assert (got.logp[0, inside] - logp.gather(1, row[1:, None])[:, 0]).abs().max() < 3e-5
        assert (got.entropy[0, inside] + (logp.exp() * logp).sum(-1)).abs().max() < 3e-5
        assert (top[0, inside] - logp.gather(1, ids[0, inside])).abs().max() < 3e-5


CLASSIFIERS = ["mistral window", "phi3", "olmo2", "smollm3", "gemma2", "gemma3"]
MORE_CLASSIFIERS = ["gemma", "olmo3", "exaone4", "ministral3", "gpt_oss", "qwen2_moe"]


@pytest.mark.parametrize("name", quick([*CLASSIFIERS, *MORE_CLASSIFIERS], CLASSIFIERS))
def test_reward_models_are_sequence_classifiers(name, tmp_path):
    config = transformers.AutoConfig.for_model(**SMALL | (ALL | CONFIGS)[name], num_labels=1)
    torch.manual_seed(0)
    random_weights(transformers.AutoModelForSequenceClassification.from_config(config)).save_pretrained(
        tmp_path / "theirs"
    )
    peer = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "theirs").eval()
    model, params = hf.load(tmp_path / "theirs")
    tokens_BT = tokens_of(model.config)
    with torch.no_grad():
        expected = peer(tokens_BT).logits[:, 0]
    longer_BT = torch.cat([tokens_BT, tokens_BT[:, :1]], 1)  # one more token reads the state at the end
    got = place(model).values(params, Batch(tokens=longer_BT, mask=None))[:, -1]
    assert expected.std() > 0.1 and (got - expected).abs().max() < 2e-5
    hf.save(tmp_path / "ours", model, params)
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        assert torch.equal(again(tokens_BT).logits[:, 0], expected)


def test_a_family_without_classifiers_holds_no_reward(tmp_path):
    from funrl.models import decoder_model, with_value_head

    model = decoder_model(config_from_hf(SMALL | CONFIGS["granite"]))
    hf.check_savable(model)
    with pytest.raises(ModelError, match="transformers has no sequence classifier for granite"):
        hf.check_savable(with_value_head(model))


@pytest.mark.parametrize(
    "name,change,message",
    [
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "rope_scaling is .*Missing required keys.*short_factor"),
        ("phi3", {"rope_scaling": LINEAR}, "rope_scaling is .*must be one of .'longrope'., got linear"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5: 12 of the 8 numbers of a head are"),
        ("mistral window", {"layer_types": ["full_attention"] * 3}, "layer_types is .*supported is None"),
        ("olmo2", {"mlp_bias": True}, "mlp_bias is True"),
        ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers is \[1\]"),
        ("granite", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation is 'relu', supported is 'gelu_pytorch_tanh'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma2", {"sliding_window": None}, "'sliding_attention' but sliding_window is off"),
        ("gemma2", {"query_pre_attn_scalar": 12.5}, "query_pre_attn_scalar is 12.5"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, supported is None"),
        ("gemma3", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters is .*must be given per layer type"),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": LINEAR}},
            "rope_parameters.sliding_attention.rope_type is 'linear', supported is 'default'",
        ),
    ],
)
def test_what_a_family_does_not_support_is_named(name, change, message):
    with pytest.raises(ModelError, match=message):
        config_from_hf(SMALL | CONFIGS[name] | change)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_compiled_step_says_what_it_does_not_take(name):
    config = config_from_hf(SMALL | CONFIGS[name])
    problem = kernel_problem(step_sizes(config), torch.float32) or ""
    taken = config.source.family in ("mistral", "phi3")
    assert ("does not take" in problem) != taken
    if not taken:
        switch, value = problem.split("does not take ")[1].split("=", 1)
        assert str(flat_fields(config)[switch]) == value


def test_a_fused_tensor_of_the_wrong_size_is_named(tmp_path):
    peer_of(CONFIGS["phi3"], tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_key_value_heads": 3}))
    with pytest.raises(ModelError, match=r"qkv_proj.weight has shape \[144, 48\], config.json says \[96, 48\]"):
        hf.check_directory(tmp_path)


def test_a_rank_reads_its_own_part_of_fused_tensors(tmp_path):
    from funrl.mesh import rules
    from funrl.mesh.mesh import Mesh, parse

    peer_of(CONFIGS["phi3"], tmp_path)
    model, params = hf.load(tmp_path)
    sizes = parse("dp2,tp2")
    layouts = rules.layouts(model.shapes, model.axes, rules.fully_sharded(rules.STORED) | {"vocab": None}, sizes)
    for rank in range(4):
        mesh = Mesh(sizes, rank=rank)
        local = own_part(tmp_path, model, getattr(torch, model.config.source.dtype), layouts, rank)
        expected = rules.shard(params, layouts, mesh)
        assert all(torch.equal(a, b) for a, b in zip(trees.leaves(local), trees.leaves(expected), strict=True))


def test_16_bits_follow_transformers(tmp_path):
    """Gemma's norms, embeddings and caps round where transformers rounds."""
    for name in ("gemma2", "gemma3 stretched"):
        peer_of(CONFIGS[name], tmp_path / name)
        low = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16).eval()
        model, params = hf.load(tmp_path / name, torch.bfloat16)
        tokens_BT = tokens_of(model.config)
        with torch.no_grad():
            hidden, expected = model.apply(params, Inputs(tokens_BT)).hidden, low.model(tokens_BT).last_hidden_state
        assert hidden.dtype == torch.bfloat16
        assert (hidden.float() - expected.float()).norm() < 0.02 * expected.float().norm()
