"""Our decoder against transformers: logits, greedy continuations, save and load."""

import os
from pathlib import Path

import pytest
import torch
import transformers
from hf_peers import SMALL
from paged_rows import Rows

from funrl import trees
from funrl.batch import Batch
from funrl.models import Config, Inputs, place
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.config import config_from_hf, config_to_hf

pytestmark = pytest.mark.versions

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
CONFIGS = {
    "llama2": {"model_type": "llama", "num_key_value_heads": 6, "rms_norm_eps": 1e-5},
    "llama3": {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": LLAMA3, "rms_norm_eps": 1e-5},
    "llama-linear-tied": {
        "model_type": "llama",
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "tie_word_embeddings": True,
    },
    "llama-bias-free-head": {"model_type": "llama", "attention_bias": True, "head_dim": 20, "num_key_value_heads": 1},
    "qwen2-tied": {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "qwen2-window": {"model_type": "qwen2", **WINDOW},
    "qwen3": {"model_type": "qwen3", "head_dim": 20, "rope_theta": 1e6, "tie_word_embeddings": True},
    "qwen3-bias-window": {"model_type": "qwen3", "head_dim": 8, "attention_bias": True, **WINDOW},
}


def _data() -> Path:
    return Path(os.environ.get("FUNRL_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")


def _theirs(name: str, folder: Path, dtype=torch.float32):
    """A random transformers model with norms and biases that matter, saved to `folder`."""
    raw = dict(SMALL | CONFIGS[name])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**raw), dtype=dtype).eval()
    with torch.no_grad():
        for key, x in model.named_parameters():
            x.normal_(1.0 if key.endswith("norm.weight") else 0.0, 0.1)
    model.save_pretrained(folder)
    return model


def _logits(model, params, tokens_BT):
    return model.apply(params, Inputs(tokens_BT)).hidden @ model.unembed(params).T


def _tokens(config: Config, rows=3, length=40):
    return torch.randint(0, config.vocab, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_round_trip(name, tmp_path):
    peer = _theirs(name, tmp_path / "theirs")
    model, params = hf.load(tmp_path / "theirs")
    tokens_BT = _tokens(model.config)
    with torch.no_grad():
        expected = peer(tokens_BT).logits
    got = _logits(model, params, tokens_BT)
    assert expected.std() > 0.1
    assert (got - expected).abs().max() < 2e-5

    hf.save(tmp_path / "ours", model, params)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        assert torch.equal(again(tokens_BT).logits, expected)
    model_again, params_again = hf.load(tmp_path / "ours")
    assert model_again.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(trees.leaves(params), trees.leaves(params_again), strict=True))


@pytest.mark.parametrize("name", ["llama3", "qwen2-window", "qwen3"])
def test_greedy_continuation(name, tmp_path):
    peer = _theirs(name, tmp_path)
    model, params = hf.load(tmp_path)
    tokens_BT = _tokens(model.config, rows=2, length=9)
    with torch.no_grad():
        expected = peer.generate(tokens_BT, max_new_tokens=16, do_sample=False, eos_token_id=None)
        rows = Rows(model, params, torch.cat((tokens_BT, torch.zeros(2, 16, dtype=torch.int64)), 1))
        hidden_RD = rows.pass_of([9, 9]).view(2, 9, -1)[:, -1]
        for at in range(9, 25):
            rows.tokens_BT[:, at] = (hidden_RD @ model.unembed(params).T).argmax(-1)
            hidden_RD = rows.pass_of([1, 1])
    assert torch.equal(rows.tokens_BT, expected)


def test_bfloat16_is_close_to_float32(tmp_path):
    _theirs("qwen3", tmp_path)
    model, params = hf.load(tmp_path)
    _, low = hf.load(tmp_path, torch.bfloat16)
    tokens_BT = _tokens(model.config)
    assert low["embed"].dtype == torch.bfloat16

    def loss(p):
        return _logits(model, p, tokens_BT).float().logsumexp(-1).mean(), ()

    (value, _), grads = trees.value_and_grad(loss)(params)
    (value_low, _), grads_low = trees.value_and_grad(loss)(low)
    assert abs(value - value_low) < 0.01 * abs(value)
    for (key, g), g_low in zip(trees.named(grads), trees.leaves(grads_low), strict=True):
        assert (g - g_low.float()).norm() < 0.1 * g.norm() + 1e-6, key


def test_float64_stays_float64(tmp_path):
    peer = _theirs("llama3", tmp_path)
    model, params = hf.load(tmp_path, torch.float64)
    tokens_BT = _tokens(model.config, length=64)
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.extend(x.dtype for x in (out if isinstance(out, tuple | list) else [out]) if torch.is_tensor(x))
            return out

    with Watch():
        got = _logits(model, params, tokens_BT)
    # Nothing narrower than float64 may be made on the way.
    assert got.dtype == torch.float64 and torch.float64 in seen
    assert not {torch.float32, torch.bfloat16, torch.float16} & set(seen)
    with torch.no_grad():
        assert (peer.double()(tokens_BT).logits - got).abs().max() < 1e-4  # theirs has float32 rotary positions


@pytest.mark.parametrize("name", ["llama3", "qwen2-tied", "qwen3"])
def test_reward_models_are_sequence_classifiers(name, tmp_path):
    """Theirs read here, and ours read there: the score at the last token of every row."""
    config = transformers.AutoConfig.for_model(**SMALL | CONFIGS[name], num_labels=1)
    torch.manual_seed(0)
    peer = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        for key, x in peer.named_parameters():
            x.normal_(1.0 if key.endswith("norm.weight") else 0.0, 0.1)
    peer.save_pretrained(tmp_path / "theirs")
    model, params = hf.load(tmp_path / "theirs")
    tokens_BT = _tokens(model.config).clamp(min=1)  # 0 is padding
    with torch.no_grad():
        expected = peer(tokens_BT).logits[:, 0]
    # Position t speaks of the state before token t, so one more token reads the state at the end.
    longer_BT = torch.cat([tokens_BT, tokens_BT[:, :1]], 1)
    got = place(model).values(params, Batch(tokens=longer_BT, mask=None))[:, -1]
    assert expected.std() > 0.1 and (got - expected).abs().max() < 2e-5
    hf.save(tmp_path / "ours", model, params)
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        assert torch.equal(again(tokens_BT).logits[:, 0], expected)


@pytest.mark.data
def test_stories():
    folder = _data() / "stories260k"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent; set FUNRL_DATA")
    model, params = hf.load(folder)
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens_BT = torch.tensor([tokenizer.encode("Once upon a time, there was a little girl named Lily. She had a dog.")])
    with torch.no_grad():
        expected = peer(tokens_BT).logits
    assert (_logits(model, params, tokens_BT) - expected).abs().max() < 2e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_config_round_trip_through_transformers(name):
    raw = SMALL | CONFIGS[name]
    config = config_from_hf(raw)
    assert config_from_hf(config_to_hf(config)) == config
    theirs = transformers.AutoConfig.for_model(**raw).to_dict()  # has every field, in the spelling of transformers 5
    seen = config_from_hf(theirs)
    assert seen == config
