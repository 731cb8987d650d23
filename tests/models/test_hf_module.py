"""Models of transformers' own code as functions of their weights: against the modules themselves."""

import functools
import json

import pytest
import torch
import transformers
from hf_peers import random_weights, tokens_of
from safetensors.torch import load_file, save_file

from funrl import trees
from funrl.batch import Batch
from funrl.mesh.launch import launch
from funrl.mesh.mesh import parse
from funrl.mesh.reshard import unshard
from funrl.mesh.rules import COMPUTE, STORED, fully_sharded, shard
from funrl.mesh.sums import sum_rest
from funrl.models import Inputs, ModelError, place, rematerialized, with_value_head
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.modules import packs
from funrl.models.huggingface.names import names_of
from funrl.rollout.native.engine import native_engine

SIZES = {"vocab_size": 61, "num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32}
CONFIGS = {
    "gpt2": {"model_type": "gpt2", "n_positions": 64},
    "gpt2 scaled by layer": {"model_type": "gpt2", "n_positions": 64, "scale_attn_by_inverse_layer_idx": True},
    "gpt_neox": {"model_type": "gpt_neox", "intermediate_size": 48, "max_position_embeddings": 64},
    "gpt_neox serial": {
        "model_type": "gpt_neox",
        "intermediate_size": 48,
        "use_parallel_residual": False,
        "tie_word_embeddings": True,
    },
    "opt": {"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "bloom": {"model_type": "bloom"},
    "mamba": {"model_type": "mamba", "state_size": 4},
    "apertus with buffers": {"model_type": "apertus", "intermediate_size": 48},
    "mamba2 with an infinity": {
        "model_type": "mamba2",
        "state_size": 4,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "bamba with an infinity": {
        "model_type": "bamba",
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 4,
        "mamba_chunk_size": 8,
    },
    "qwen2": {
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
}
PADDED = ["bloom", "mamba", "mamba2 with an infinity", "bamba with an infinity"]


def _saved(name, folder):
    """A random module, saved."""
    torch.manual_seed(0)
    raw = SIZES | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0} | CONFIGS[name]
    config = transformers.AutoConfig.for_model(**raw)
    peer = random_weights(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    peer.save_pretrained(folder)
    return peer


def _read(folder, dtype=torch.float32):
    model = hf.check_directory(folder, "hf")
    return model, hf.load(folder, dtype, model=model)[1]


def _packed(tokens_BT, lengths, padding=3):
    """Beginnings of the rows end to end, with padding behind."""
    parts = [row[:n] for row, n in zip(tokens_BT, lengths, strict=True)]
    counts, none = torch.tensor(lengths), torch.zeros(padding, dtype=torch.int64)
    segments = torch.cat([torch.repeat_interleave(torch.arange(1, len(parts) + 1), counts), none])
    positions = torch.cat([*(torch.arange(n) for n in lengths), none])
    offsets = torch.cat([torch.zeros(1), counts.cumsum(0), counts.sum()[None]]).int()
    tokens = torch.cat([*parts, none])
    return Batch(tokens=tokens[None], mask=None, positions=positions[None], segments=segments[None], offsets=offsets)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_saved_files_and_packed_rows_are_the_modules(name, tmp_path):
    peer = _saved(name, tmp_path / "theirs")
    assert ("__float__" in (tmp_path / "theirs" / "config.json").read_text()) == ("infinity" in name)
    model, params = _read(tmp_path / "theirs")
    assert bool(model.abilities.constant) == ("buffers" in name)
    assert packs(model.config) == (name not in PADDED)
    tokens_BT = tokens_of(model.config, 3, 24)
    with torch.no_grad():
        expected = peer(tokens_BT).logits
        hidden_BTD = model.apply(params, Inputs(tokens_BT)).hidden
    assert expected.std() > 0.1
    assert (hidden_BTD @ model.unembed(params).T - expected).abs().max() < 2e-5

    lengths = (13, 24, 1)
    batch, logp = _packed(tokens_BT, lengths), expected.log_softmax(-1)
    got = place(model).token_scores(params, batch).logp[0].split([*lengths, 3])
    for row, tokens, own in zip(logp, tokens_BT, got, strict=False):
        wanted = row[: len(own) - 1].gather(1, tokens[1 : len(own), None])[:, 0]
        assert own[0] == 0 and ((own[1:] - wanted).abs() < 3e-5).all()
    assert torch.equal(got[3], torch.zeros(3))

    hf.save(tmp_path / "ours", model, params)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        assert torch.equal(again(tokens_BT).logits, expected)
    model_again, params_again = _read(tmp_path / "ours")
    assert model_again.config.layers == 3 and names_of(model_again) == names_of(model)
    assert all(torch.equal(a, b) for a, b in zip(trees.leaves(params), trees.leaves(params_again), strict=True))


def test_a_new_model_has_the_buffers_of_a_new_module(tmp_path):
    peer = _saved("apertus with buffers", tmp_path)
    model, _ = _read(tmp_path)
    params = dict(trees.named(model.init(torch.Generator().manual_seed(0))))
    there = dict(peer.named_buffers())
    assert len(model.abilities.constant) == 6
    for name in model.abilities.constant:
        assert torch.equal(params[name], there[names_of(model)[name][0]].float())


@pytest.mark.parametrize("name", ["gpt2", "bloom"])
def test_gradients_are_the_modules(name, tmp_path):
    """In float64 and computed again layer by layer, of a policy and a critic; those of transformers of whole rows."""
    peer = _saved(name, tmp_path).double()
    model, params = _read(tmp_path, torch.float64)
    tokens_BT, lengths = tokens_of(model.config, 3, 24), (24, 7, 13)
    batch = _packed(tokens_BT, lengths)
    critic = place(with_value_head(model), dtype=torch.float64)
    weights = {"policy": params, "critic": critic.copy_from(place(model), params)}
    weights["critic"]["value"] += 0.1

    def loss(remat):
        layer = rematerialized(model.layer, remat)
        policy = place(model, dtype=torch.float64, layer=layer)
        valued = place(critic.model, dtype=torch.float64, layer=layer)

        def of(p):
            logp, values = policy.token_scores(p["policy"], batch).logp, valued.values(p["critic"], batch)
            return logp.square().sum() + values.sin().sum(), ()

        return of

    (value, _), grads = trees.value_and_grad(loss("none"))(weights)
    for remat in ("full", "selective"):
        (again, _), others = trees.value_and_grad(loss(remat))(weights)
        assert abs(again - value) < 1e-12 * abs(value)
        assert all((a - b).abs().max() < 1e-10 for a, b in zip(trees.leaves(grads), trees.leaves(others), strict=True))

    peer.requires_grad_(True)
    for row, n in zip(tokens_BT, lengths, strict=True):
        logp = peer(row[None, :n]).logits[0, :-1].log_softmax(-1).gather(1, row[1:n, None])
        logp.square().sum().backward()
    theirs = {key: x.grad for key, x in peer.named_parameters()}
    for key, grad in trees.named(grads["policy"]):
        expected = theirs[names_of(model)[key][0]]
        assert (grad - expected).abs().max() < 1e-7 * (1 + expected.abs().max()), key  # float32 inside of some modules


def _sharded(folder, params, batch, mesh):
    """Loss and whole gradients of rows that are split over two ranks, with weights in shards."""
    model = hf.check_directory(folder, "hf")
    placed = place(model, mesh, fully_sharded(STORED), COMPUTE, torch.float64)
    mine = shard(params, placed.stored, mesh)
    own = batch[mesh.index("data")]
    (loss, _), grads = trees.value_and_grad(lambda p: (placed.token_scores(p, own).logp.square().sum(), ()))(mine)
    grads, loss = sum_rest(grads, loss, placed.stored, placed.compute, mesh)
    split = sum(x.shape != y.shape for x, y in zip(trees.leaves(mine), trees.leaves(params), strict=True))
    return loss, unshard(grads, placed.stored, mesh), split


@pytest.mark.gloo
def test_full_sharding_gives_the_gradients_of_one_device(tmp_path):
    _saved("gpt2", tmp_path)
    model, params = _read(tmp_path, torch.float64)
    tokens_BT = tokens_of(model.config, 3, 24)
    batches = _packed(tokens_BT, (24, 7, 13)), _packed(tokens_BT.flip(0), (2, 20, 22))
    alone = place(model, dtype=torch.float64)

    def loss(p):
        return sum(alone.token_scores(p, batch).logp.square().sum() for batch in batches), ()

    (expected, _), whole = trees.value_and_grad(loss)(params)
    result, grads, split = launch(functools.partial(_sharded, tmp_path, params, batches), parse("dp2"), "cpu")
    assert split > 3 * 4 and abs(result - expected) < 1e-12 * abs(expected)
    assert all((a - b).abs().max() < 1e-10 for a, b in zip(trees.leaves(grads), trees.leaves(whole), strict=True))


def test_old_names_in_files_are_found(tmp_path):
    """GPT-2's own files lack the name of the base model and have masks; GPT-NeoX's have another name of the head."""
    _saved("gpt2", tmp_path)
    _, params = _read(tmp_path)
    tensors = {key.removeprefix("transformer."): x for key, x in load_file(tmp_path / "model.safetensors").items()}
    tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 4, 4) for i in range(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert "wte.weight" in tensors
    assert all(torch.equal(a, b) for a, b in zip(trees.leaves(params), trees.leaves(_read(tmp_path)[1]), strict=True))
    _saved("gpt_neox", tmp_path / "neox")
    assert "embed_out.weight" in load_file(tmp_path / "neox" / "model.safetensors")
    assert _read(tmp_path / "neox")[1]["unembed"].shape == (61, 32)


def test_a_missing_tensor_is_named(tmp_path):
    _saved("gpt2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"1 tensors are missing, the first is transformer.h.1.mlp.c_fc.weight"):
        hf.check_directory(tmp_path, "hf")


REFUSED = {
    "t5": ({"model_type": "t5"}, "transformers cannot make a causal language model of it"),
    "nothing": ({"model_type": "no_such_model"}, "model_type is 'no_such_model', which transformers does not know"),
    "granite": (
        {"model_type": "granite", "num_key_value_heads": 2, "intermediate_size": 48, "logits_scaling": 3.0},
        "GraniteForCausalLM does more for its logits than multiplying hidden states by its unembedding",
    ),
    "phi": ({"model_type": "phi", "intermediate_size": 48}, "the unembedding of PhiForCausalLM has a bias"),
    "quantized": ({"model_type": "gpt2", "quantization_config": {"bits": 4}}, "quant_method is None, supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_computed_is_refused_by_name(case, tmp_path):
    raw, message = REFUSED[case]
    (tmp_path / "config.json").write_text(json.dumps(SIZES | raw))
    with pytest.raises(ModelError, match=message):
        hf.load_model(tmp_path, "hf")


def test_whose_code_computes_a_model(tmp_path):
    _saved("qwen2", tmp_path / "qwen2")
    _saved("gpt2", tmp_path / "gpt2")
    for folder, code, own in (
        ("qwen2", "auto", False),
        ("qwen2", "native", False),
        ("qwen2", "hf", True),
        ("gpt2", "auto", True),
    ):
        assert bool(hf.load_model(tmp_path / folder, code).abilities.code) == own
    with pytest.raises(ModelError, match="model_type is 'gpt2', supported are"):
        hf.load_model(tmp_path / "gpt2")


def test_a_shallower_one_is_the_beginning_of_it(tmp_path):
    _saved("qwen2", tmp_path)
    model, params = _read(tmp_path)
    part = model.with_layers(2)
    assert {name for name, _ in trees.named(part.shapes)} == {n for n in names_of(model) if "layers/2/" not in n}
    few = params | {"layers": params["layers"][:2]}
    assert part.apply(few, Inputs(tokens_of(model.config, 2, 8))).hidden.shape == (2, 8, 32)


def test_it_has_no_pages(tmp_path):
    _saved("gpt2", tmp_path)
    model, _ = _read(tmp_path)
    assert model.generates and not model.pages
    with pytest.raises(ModelError, match="GPT2LMHeadModel is transformers' own code, without pages: use hf_engine"):
        native_engine(model)
