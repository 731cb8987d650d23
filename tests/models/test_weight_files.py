"""Odd config.json, index and table of weights: refused in a line that names the file and the field."""

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from funrl.models import decoder_config, decoder_model
from funrl.models.errors import ModelError
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.weight_files import read_table

CONFIG = decoder_config(vocab=16, embed=8, layers=1, heads=2, kv_heads=1, head=4, mlp=8, tied=True, eos=(1,), pad=0)


@pytest.fixture
def folder(tmp_path):
    model = decoder_model(CONFIG)
    hf.save(tmp_path / "model", model, model.init(torch.Generator().manual_seed(0)))
    return tmp_path / "model"


def write_table(file, table, nbytes=0):
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(nbytes))


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
TABLES = [
    ([1], 0),
    (b"[" * 5000, 0),
    ({"a": None}, 0),
    ({"a": ENTRY | {"dtype": 3}}, 8),
    ({"a": ENTRY | {"shape": [-2]}}, 8),
    ({"a": ENTRY | {"shape": [2**62, 2**62]}}, 8),
    ({"a": ENTRY | {"data_offsets": [8, 0]}}, 8),
    ({"a": ENTRY, "b": ENTRY}, 8),
    ({"a": ENTRY, "b": ENTRY | {"data_offsets": [12, 20]}}, 20),
    ({"a": ENTRY}, 4),
]


@pytest.mark.parametrize(("table", "nbytes"), TABLES, ids=range(len(TABLES)))
def test_an_odd_table_is_refused(table, nbytes, tmp_path):
    write_table(tmp_path / "x.safetensors", table, nbytes)
    with pytest.raises(ModelError) as refused:
        read_table(tmp_path / "x.safetensors")
    assert str(refused.value).startswith(f"{tmp_path / 'x.safetensors'}: it is cut short or damaged: ")


def test_an_absurd_table_is_not_read(tmp_path):
    with open(tmp_path / "x.safetensors", "wb") as file:  # sparse
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(100_000_100)
    with pytest.raises(ModelError, match="header too large"):
        read_table(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("../other/model.safetensors", "which is not in the directory; put it there"),
        ("/etc/passwd", "which is not in the directory"),
        (None, "is None, it must be the name of a file"),
        (3, "is 3, it must be"),
        ("a\0b", "it must be the name of a file"),
        ("x" * 300, "it must be the name of a file"),
        ("gone.safetensors", "gone.safetensors is missing"),
        ("model.safetensors", "lacks x"),
    ],
)
def test_an_index_names_files_of_its_directory(file, says, folder):
    shutil.copytree(folder, folder.parent / "other")
    (folder / "part.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors").unlink()
    if file == "model.safetensors":
        file = "part.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": file}}))
    with pytest.raises(ModelError) as refused:
        hf.check_directory(folder)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_a_second_copy_of_tied_embeddings_is_a_copy(folder):
    weights = load_file(folder / "model.safetensors")
    copy = weights["model.embed_tokens.weight"].clone()
    save_file(weights | {"lm_head.weight": copy}, folder / "model.safetensors")
    assert hf.check_directory(folder).config.tied
    copy[3, 3] += 1
    save_file(weights | {"lm_head.weight": copy}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"lm_head.weight is not model.embed_tokens.weight.*set it to false to use"):
        hf.check_directory(folder)
    save_file(weights | {"lm_head.weight": copy[:3].clone()}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="tie_word_embeddings: true"):
        hf.check_directory(folder)


FIELDS = [
    ("rms_norm_eps", "small", "expected float"),
    ("rms_norm_eps", None, "expected float"),
    ("rms_norm_eps", float("nan"), "a number above 0"),
    ("rope_theta", 10**400, "a number above 0"),
    ("rope_theta", [1], "a number above 0"),
    ("sliding_window", "many", "expected int"),
    ("eos_token_id", "</s>", "expected int"),
    ("eos_token_id", [1, None], "match any type in"),
    ("bos_token_id", 1.5, "expected int"),
    ("pad_token_id", {}, "expected int"),
    ("tie_word_embeddings", "yes", "expected bool"),
    ("layer_types", 3, "a list of texts"),
    ("layer_types", [["full_attention"]], "a list of texts"),
    ("rope_scaling", [8], "match any type in"),
    ("rope_scaling.rope_type", {"rope_type": ["linear"]}, "must be text"),
    ("rope_scaling.factor", {"rope_type": "linear", "factor": "8"}, "factor is '8', it must be a number"),
    ("dtype", 32, "supported are"),
    ("vocab_size", 10**30, "at most"),
    ("num_hidden_layers", 10**9, "at most 4096"),
    ("num_hidden_layers", 2.0, "a whole number"),
    ("hidden_size", True, "a whole number"),
    ("num_labels", "one", "num_labels is 'one'"),
    ("id2label", [0], "id2label is [0]"),
]


@pytest.mark.parametrize(("field", "value", "says"), FIELDS, ids=range(len(FIELDS)))
def test_an_odd_field_is_named_with_its_value(field, value, says, folder):
    raw = json.loads((folder / "config.json").read_text())
    name = "rope_scaling" if isinstance(value, dict) and value else field
    (folder / "config.json").write_text(json.dumps(raw | {"model_type": "mistral", name: value}))
    with pytest.raises(ModelError) as refused:
        hf.check_directory(folder, "auto")
    assert str(refused.value).startswith(f"{folder / 'config.json'}: {field}") and says in str(refused.value)


@pytest.mark.parametrize("value", ["many", [], {}, 10**9, float("nan")])
def test_of_another_family_too_nothing_odd_is_a_traceback(value, folder):
    raw = json.loads((folder / "config.json").read_text())
    for field in ("n_embd", "n_layer", "n_head"):
        small = raw | {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, field: value}
        (folder / "config.json").write_text(json.dumps(small))
        with pytest.raises(ModelError) as refused:
            hf.check_directory(folder, "auto")
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers_are_refused_with_their_tensor(value, tmp_path):
    model = decoder_model(decoder_config(vocab=8, embed=8, layers=2, heads=2, kv_heads=2, head=4, mlp=8))
    hf.save(tmp_path, model, model.init(torch.Generator().manual_seed(0)))
    hf.load(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    message = r"1 numbers of the tensor model\.layers\.1\.mlp\.up_proj\.weight are NaN or infinite"
    with pytest.raises(ModelError, match=message):
        hf.load(tmp_path)
