"""Directories whose experts are stored in MXFP4: what they say, read in any part, against a loop over blocks."""

import json

import pytest
import torch
from family_configs import SINKS
from hf_peers import peer_of
from safetensors.torch import load_file, save_file

from funrl import trees
from funrl.mesh import rules
from funrl.mesh.mesh import Mesh, parse
from funrl.models import ModelError
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.left_out import remarks_on_files
from funrl.models.huggingface.mxfp4_files import NUMBERS, Unpacked

RAW = SINKS["gpt_oss"] | {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 4}


def meant(blocks, scales):
    """[E, K, N] of blocks [E, N, K / 32, 16], number by number."""
    E, N, G, _ = blocks.shape
    x = torch.zeros(E, 32 * G, N)
    for e, n, g, b in torch.cartesian_prod(*map(torch.arange, blocks.shape)).tolist():
        byte, factor = int(blocks[e, n, g, b]), 2.0 ** (int(scales[e, n, g]) - 127)
        x[e, 32 * g + 2 * b, n] = NUMBERS[byte % 16] * factor
        x[e, 32 * g + 2 * b + 1, n] = NUMBERS[byte // 16] * factor
    return x


def to_mxfp4(folder):
    """Store the matrices of a directory's experts in MXFP4, with random numbers; returns all tensors as meant."""
    generator = torch.Generator().manual_seed(0)
    tensors, stored = load_file(folder / "model.safetensors"), {}
    for name, x in list(tensors.items()):
        if not name.endswith(("gate_up_proj", "experts.down_proj")):
            stored[name] = x
            continue
        shape = (x.shape[0], x.shape[2], x.shape[1] // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 126, shape, generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = meant(blocks, scales)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": quantization}))
    return tensors, stored


class Whole:
    """A slice object of a tensor."""

    def __init__(self, x):
        self.x = x

    def get_shape(self):
        return list(self.x.shape)

    def __getitem__(self, index):
        return self.x[index]


def test_the_numbers_are_those_of_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (2, 5, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 5, 3), generator=generator, dtype=torch.uint8)
    held, theirs = Unpacked(Whole(blocks), Whole(scales)), convert_moe_packed_tensors(blocks, scales).float()
    assert held.get_shape() == list(theirs.shape)
    for index in ((slice(None),) * 3, (slice(1, 2), slice(7, 70), slice(2, 5)), (slice(0, 2), slice(64, 65), slice(3))):
        assert torch.equal(held[index], theirs[index])


@pytest.mark.slow
def test_a_directory_is_read_and_saved_as_plain_numbers(tmp_path):
    peer_of(RAW, tmp_path / "theirs")
    tensors, _ = to_mxfp4(tmp_path / "theirs")
    model, params = hf.load(tmp_path / "theirs")
    assert remarks_on_files(tmp_path / "theirs", model)[0].startswith("the files have weights in MXFP4")
    hf.save(tmp_path / "ours", model, params)
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert ours.keys() == tensors.keys() and all(torch.equal(ours[name], x) for name, x in tensors.items())
    assert "quantization_config" not in json.loads((tmp_path / "ours" / "config.json").read_text())
    read = hf.weight_reader(tmp_path / "theirs", model, torch.float32)
    table = rules.fully_sharded(rules.STORED) | {"vocab": None}
    layouts = rules.layouts(model.shapes, model.axes, table, parse("dp2,ep2,tp2"))
    for rank in range(8):
        mesh = Mesh(parse("dp2,ep2,tp2"), rank=rank)
        expected = dict(trees.named(rules.shard(params, layouts, mesh)))
        for name, layout in trees.named(layouts):
            if "expert" in name:
                assert torch.equal(read(name, layout.box(rank)), expected[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    "change,message",
    [
        (lambda x: x[:, :1], r"gate_up_proj_blocks has shape \[4, 64, 2, 16\].*gate_up_proj_scales is U8 of shape"),
        pytest.param(lambda x: None, "gate_up_proj_scales is missing", marks=pytest.mark.slow),
    ],
)
def test_scales_that_do_not_fit_are_named(change, message, tmp_path):
    peer_of(RAW, tmp_path)
    _, stored = to_mxfp4(tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj_scales"
    changed = change(stored.pop(name))
    stored |= {} if changed is None else {name: changed.contiguous()}
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        hf.check_directory(tmp_path)
