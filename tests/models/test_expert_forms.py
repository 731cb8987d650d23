"""Files with the experts of a layer as one tensor, and one each, whichever of these the family's files usually have."""

import re

import pytest
import torch
from family_configs import ALL
from hf_peers import logits_of, peer_of, tokens_of
from safetensors.torch import load_file, save_file
from selection import quick
from test_expert_families import CONFIGS

from funrl import trees
from funrl.models import ModelError
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.weight_files import WHOLE

SEPARATE = {name: ALL[name] for name in ("qwen2_moe", "glm4_moe", "minimax_m2", "ernie4_5_moe", "qwen3_next full")}
SEPARATE |= {name: CONFIGS[name] for name in ("mixtral", "olmoe", "qwen3_moe", "deepseek_v2", "deepseek_v3")}


@pytest.mark.parametrize("name", quick(SEPARATE, ["mixtral", "qwen3_moe"]))
def test_joint_experts_are_read_where_files_have_one_each(name, tmp_path):
    peer = peer_of(SEPARATE[name], tmp_path / "one each")
    peer.save_pretrained(tmp_path / "joint", save_original_format=False)
    assert any(re.search(r"experts\.gate_up_proj$", key) for key in load_file(tmp_path / "joint" / WHOLE))
    model, params = hf.load(tmp_path / "joint")
    _, expected = hf.load(tmp_path / "one each")
    assert all(torch.equal(a, b) for a, b in zip(trees.leaves(params), trees.leaves(expected), strict=True))
    tokens_BT = tokens_of(model.config)
    with torch.no_grad():
        assert (logits_of(model, params, tokens_BT) - peer(tokens_BT).logits).abs().max() < 2e-5


def split(name, x, woven):
    """A tensor of all experts as tensors of one each; any other as it is."""
    match = re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj(_bias)?", name)
    if match is None:
        return {name: x}
    layer, kind, bias = match.groups()
    if kind == "down":
        parts = {"down": x.mT if woven and not bias else x}
    elif woven:
        parts = {part: x[..., i::2] if bias else x[..., i::2].mT for i, part in enumerate(("gate", "up"))}
    else:
        parts = dict(zip(("gate", "up"), x.chunk(2, 1), strict=True))
    end = "bias" if bias else "weight"
    return {f"{layer}.{i}.{part}_proj.{end}": y[i].contiguous() for part, y in parts.items() for i in range(len(x))}


@pytest.mark.parametrize("name", ["gpt_oss", "gemma4 experts", "qwen3_5_moe"])
def test_experts_of_one_each_are_read_where_files_have_joint_ones(name, tmp_path):
    peer_of(ALL[name]).save_pretrained(tmp_path, save_original_format=False)
    _, expected = hf.load(tmp_path)
    joint = load_file(tmp_path / WHOLE)
    separate = {}
    for key, x in joint.items():
        separate |= split(key, x, name == "gpt_oss")
    assert len(separate) > len(joint) + 20
    save_file(separate, tmp_path / WHOLE, metadata={"format": "pt"})
    _, params = hf.load(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(trees.leaves(params), trees.leaves(expected), strict=True))
    removed = next(key for key in separate if ".experts.3." in key)
    save_file({key: x for key, x in separate.items() if key != removed}, tmp_path / WHOLE)
    with pytest.raises(ModelError, match=f"1 tensors are missing, the first is {re.escape(removed)}"):
        hf.load(tmp_path)
