"""DeepSeek-V3 against transformers: gradients of packed and padded rows; its cache; files with more layers."""

import json

import pytest
import torch
from hf_peers import peer_of, tokens_of
from safetensors.torch import load_file, save_file
from test_expert_families import CONFIGS

from funrl import trees
from funrl.mesh.mesh import SINGLE, Mesh, parse
from funrl.models import Inputs, decoder_model
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.config import config_from_hf
from funrl.models.huggingface.left_out import remarks_on_files
from funrl.models.huggingface.names import names_of
from funrl.rollout.native.backends import bytes_of_page

LENGTHS = (13, 40, 27)


def packed(rows):
    """The rows end to end, with padding behind them."""
    lengths = torch.tensor([*map(len, rows), 4])
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0).int()
    segments = torch.tensor([1, 2, 3, 0]).repeat_interleave(lengths)[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    tokens = torch.cat([*rows, torch.zeros(4, dtype=torch.int64)])[None]
    return Inputs(tokens, positions, segments, offsets), slice(0, sum(LENGTHS))


def padded(rows):
    """The rows below each other, padded; and where their tokens are."""
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    real = torch.arange(tokens.shape[1]) < torch.tensor(LENGTHS)[:, None]
    return Inputs(tokens, segments=real.long()), real.flatten().nonzero()[:, 0]


def gradients_of(peer, names):
    """Its gradients by our names and in the shapes of files."""
    theirs, results = {name: x.grad for name, x in peer.named_parameters()}, {}
    for ours, (name, _) in names.items():
        layer, is_expert, last = name.partition(".experts.")
        if is_expert and last.startswith("down"):
            results[ours] = theirs[layer + ".experts.down_proj"]
        elif is_expert:
            results[ours] = theirs[layer + ".experts.gate_up_proj"].chunk(2, 1)[last.startswith("up")]
        elif name in theirs:
            results[ours] = theirs[name]
    return results


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3 stretched"])
def test_packed_and_padded_rows_have_transformers_logits_and_gradients(name, tmp_path):
    peer = peer_of(CONFIGS[name], tmp_path)
    model, params = hf.load(tmp_path)
    rows = [row[:length] for row, length in zip(tokens_of(model.config), LENGTHS, strict=True)]
    weights = torch.randn(sum(LENGTHS), model.config.vocab, generator=torch.Generator().manual_seed(4)) / 100
    expected = torch.cat([peer(row[None]).logits[0] for row in rows])
    (expected * weights).sum().backward()
    wanted = gradients_of(peer, names_of(model))
    for inputs, at in (packed(rows), padded(rows)):

        def loss(params, inputs=inputs, at=at):
            logits = model.apply(params, inputs).hidden.flatten(0, 1)[at] @ model.unembed(params).T
            return (logits * weights).sum(), logits

        (_, logits), grads = trees.value_and_grad(loss)(params)
        assert (logits - expected).abs().max() < 2e-5
        grads = dict(trees.named(grads))
        assert grads.keys() - wanted.keys() == {n for n in grads if n.endswith("router_bias")}
        for item, x in wanted.items():
            gap = (grads[item].reshape(x.shape) - x).abs().max()
            assert x.abs().max() > 1e-4 and gap < 2e-5 * max(1, x.abs().max()), item


def test_the_cache_is_one_small_vector_a_token_on_every_rank():
    raw = {"model_type": "deepseek_v3", "vocab_size": 100, "hidden_size": 7168, "num_hidden_layers": 61}
    raw |= {"intermediate_size": 18432, "num_attention_heads": 128, "num_key_value_heads": 128}
    model = decoder_model(config_from_hf(raw))
    token = 61 * (512 + 64) * 2
    for mesh in (SINGLE, Mesh(parse("tp8"))):
        assert bytes_of_page(model, mesh, torch.bfloat16) == 16 * token
    parameters = trees.count(decoder_model(config_from_hf(raw | {"vocab_size": 129280})).shapes)
    assert round(parameters / 1e9) == 671 and round(model.abilities.cost.used_parameters(parameters) / 1e9) == 38


FURTHER = ("eh_proj", "enorm", "hnorm", "shared_head.norm", "shared_head.head", "embed_tokens", "mlp.gate")


@pytest.mark.parametrize(
    "further, message", [((3,), "1 multi-token-prediction layer of"), ((3, 4), "2 multi-token-prediction layers of")]
)
def test_layers_that_predict_further_tokens_are_left_out(further, message, tmp_path):
    peer_of(CONFIGS["deepseek_v3"], tmp_path)
    model, params = hf.load(tmp_path)
    assert not remarks_on_files(tmp_path, model)
    tensors, raw = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    extra = {f"model.layers.{i}.{name}.weight": torch.zeros(2, 4) for i in further for name in FURTHER}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": len(further)}))
    again, read = hf.load(tmp_path)
    assert again.config == model.config
    assert all(torch.equal(x, y) for x, y in zip(trees.leaves(read), trees.leaves(params), strict=True))
    assert [remark.startswith(message) for remark in remarks_on_files(tmp_path, again)] == [True]
    hf.save(tmp_path / "saved", again, read)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    save_file(tensors | {"model.layers.2.eh_proj.weight": torch.zeros(2, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(hf.ModelError, match="have no place in a DeepseekV3ForCausalLM"):
        hf.check_directory(tmp_path)
