"""Directories with weights in FP8: read as their dequantized tensors, whole and by ranks; bad ones by their names."""

import functools
import json
import shutil

import pytest
import torch
import transformers
from fp8_directories import edit_config, quantize, spread, to_fp8
from hf_peers import SMALL, logits_of, peer_of, tokens_of
from own_parts import own_part
from safetensors.torch import load_file, save_file
from test_expert_families import CONFIGS

from funrl import trees
from funrl.mesh.collectives import gather_objects
from funrl.mesh.launch import launch
from funrl.mesh.mesh import parse
from funrl.mesh.rules import STORED, fully_sharded, layouts
from funrl.models import ModelError
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.fp8_files import Dequantized
from funrl.models.huggingface.left_out import remarks_on_files

QWEN = {"model_type": "qwen3", "head_dim": 8}
DEEPSEEK = CONFIGS["deepseek_v3"] | {"num_hidden_layers": 2}
TWO_EXPERTS = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}


def directories(raw, folder, **how):
    """A random model in FP8, and the same model as a plain directory of the numbers that are meant."""
    peer_of(raw, folder / "fp8")
    shutil.copytree(folder / "fp8", folder / "plain")
    save_file(to_fp8(folder / "fp8", **how), folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    return folder / "fp8", folder / "plain"


def same(ours, theirs):
    pairs = zip(trees.leaves(ours), trees.leaves(theirs), strict=True)
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize(
    "raw, how",
    [
        (DEEPSEEK, {"block": (16, 20)}),
        (QWEN, {"block": (128, 128), "dtype": torch.bfloat16}),
        (QWEN, {"block": (11, 64), "dtype": torch.float16}),
        (QWEN, {"block": None, "suffix": "_scale"}),
        ({"model_type": "phi3", "num_key_value_heads": 6}, {"block": (32, 32)}),  # q, k, v are one tensor
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_are_those_that_the_files_mean(raw, how, dtype, tmp_path):
    fp8, plain = directories(raw, tmp_path, **how)
    model, params = hf.load(fp8, dtype)
    assert model.config == hf.check_directory(plain).config
    assert same(params, hf.load(plain, dtype)[1])
    hf.save(tmp_path / "saved", model, params)
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "quantization_config" not in saved and saved["dtype"] == str(dtype).removeprefix("torch.")
    assert same(hf.load(tmp_path / "saved", dtype)[1], params)
    assert "FP8" in "".join(remarks_on_files(fp8, model)) and not remarks_on_files(tmp_path / "saved", model)


@pytest.mark.parametrize("raw", [DEEPSEEK, QWEN], ids=["deepseek_v3", "qwen3"])
def test_transformers_dequantizes_them_alike(raw, tmp_path):
    pytest.importorskip("accelerate")
    fp8, _ = directories(raw, tmp_path, block=(4, 4))  # it takes no cut blocks
    model, params = hf.load(fp8)
    how = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(4, 4))
    peer = transformers.AutoModelForCausalLM.from_pretrained(fp8, quantization_config=how, dtype=torch.float32).eval()
    tokens_BT = tokens_of(model.config)
    with torch.no_grad():
        assert (logits_of(model, params, tokens_BT) - peer(tokens_BT).logits).abs().max() < 2e-5


def test_a_part_takes_the_scales_of_its_own_blocks():
    class Watched:
        def __init__(self, x):
            self.x, self.asked = x, []

        def get_shape(self):
            return list(self.x.shape)

        def __getitem__(self, index):
            self.asked.append([(part.start, part.stop) for part in index])
            return self.x[index]

    w, block = torch.randn(23, 17, generator=torch.Generator().manual_seed(0)), (5, 4)
    stored, scales = quantize(w, block)
    whole, held = stored.float() * spread(scales, block, w.shape), Watched(scales)
    read = Dequantized(Watched(stored), held, block)
    for low, high, first, last, asked in [
        (0, 23, 0, 17, [(0, 5), (0, 5)]),
        (4, 6, 3, 9, [(0, 2), (0, 3)]),
        (10, 15, 16, 17, [(2, 3), (4, 5)]),
        (22, 23, 0, 4, [(4, 5), (0, 1)]),
    ]:
        assert torch.equal(read[low:high, first:last], whole[low:high, first:last])
        assert held.asked.pop() == asked
    assert read[3:3].shape == (0, 17) and not held.asked
    assert torch.equal(read[7:9], whole[7:9])


def test_a_rank_reads_its_own_part(tmp_path):
    fp8, _ = directories(DEEPSEEK, tmp_path, block=(16, 20))
    model, whole = hf.load(fp8)
    sizes = parse("dp2,tp2")
    placed = layouts(model.shapes, model.axes, fully_sharded(STORED) | {"vocab": None}, sizes)
    for rank in range(4):
        own = own_part(fp8, model, getattr(torch, model.config.source.dtype), placed, rank)
        box = trees.map(lambda x, layout, rank=rank: x[tuple(slice(*b) for b in layout.box(rank))], whole, placed)
        assert same(own, box)


def _shared(folder, model, mesh):
    """Whether this rank has what it would read alone, and the dtypes of its weights."""
    placed = layouts(model.shapes, model.axes, fully_sharded(STORED) | {"vocab": None}, mesh.sizes)
    alone = own_part(folder, model, torch.bfloat16, placed, mesh.rank)
    _, result = hf.load(folder, torch.bfloat16, mesh, layouts=placed, model=model)
    return gather_objects(same(result, alone), mesh)


@pytest.mark.gloo
def test_ranks_read_fp8_together(tmp_path):
    fp8, _ = directories(DEEPSEEK | TWO_EXPERTS, tmp_path, block=(16, 20))  # some of four ranks read no router bias
    model = hf.check_directory(fp8)
    assert launch(functools.partial(_shared, fp8, model), parse("dp2,tp2"), "cpu") == [True] * 4


K = "model.layers.0.self_attn.k_proj.weight"
CONFIG, WEIGHTS = "config.json: quantization_config", f"model.safetensors: {K}"


def _tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def _how(**fields):
    how = {"quant_method": "fp8", "weight_block_size": [16, 16]} | fields
    return lambda folder: edit_config(folder, quantization_config=how)


BROKEN = {
    "gptq": (_how(quant_method="gptq"), f"{CONFIG}.quant_method is 'gptq', supported are 'fp8' and 'mxfp4'; take the"),
    "no method": (_how(quant_method=None), f"{CONFIG}.quant_method is None, supported are 'fp8' and"),
    "not an object": (lambda d: edit_config(d, quantization_config="fp8"), f"{CONFIG} is 'fp8', it must be an object"),
    "e5m2": (_how(fmt="e5m2"), f"{CONFIG}.fmt is 'e5m2', supported is 'e4m3'"),
    "three sizes": (_how(weight_block_size=[1, 2, 3]), f"{CONFIG}.weight_block_size is [1, 2, 3], it must be two"),
    "zero": (_how(weight_block_size=[0, 2]), f"{CONFIG}.weight_block_size is [0, 2], it must be two whole numbers"),
    "other blocks": (
        _how(weight_block_size=[16, 8]),
        f"{WEIGHTS}_scale_inv has shape [1, 3], {K} of shape [16, 48] with weight_block_size [16, 8] in config.json "
        "needs [1, 6]",
    ),
    "no blocks": (_how(weight_block_size=None), "with weight_block_size null in config.json needs [1, 1]"),
    "not said": (
        lambda d: edit_config(d, quantization_config=None),
        f"{WEIGHTS} has dtype F8_E4M3, but config.json has no quantization_config that says how it is scaled",
    ),
    "no scales": (
        lambda d: _tensors(d, lambda t: t.pop(f"{K}_scale_inv")),
        f"{WEIGHTS} has dtype F8_E4M3, but its scales, {K}_scale_inv, are missing",
    ),
    "whole numbers": (
        lambda d: _tensors(d, lambda t: t.update({f"{K}_scale_inv": t[f"{K}_scale_inv"].to(torch.int32)})),
        f"{WEIGHTS}_scale_inv has dtype I32, supported are ['F32', 'BF16', 'F16']",
    ),
    "vector": (
        lambda d: _tensors(d, lambda t: t.update({"model.norm.weight": torch.zeros(48, dtype=torch.float8_e4m3fn)})),
        "model.safetensors: model.norm.weight has dtype F8_E4M3 and shape [48], FP8 is supported of matrices",
    ),
    "other eight bits": (
        lambda d: _tensors(d, lambda t: t.update({K: torch.zeros(16, 48, dtype=torch.float8_e5m2)})),
        f"{WEIGHTS} has dtype F8_E5M2, supported are",
    ),
    "scales of nothing": (
        lambda d: _tensors(d, lambda t: t.update({K: torch.zeros(16, 48)})),
        "1 tensors have no place in a Qwen3ForCausalLM",
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8")
    peer_of(QWEN | {"num_hidden_layers": 1}, folder)
    to_fp8(folder)
    return folder


@pytest.mark.parametrize("case", BROKEN)
def test_a_bad_directory_is_named(case, good, tmp_path):
    shutil.copytree(good, tmp_path / "bad")
    assert hf.check_directory(tmp_path / "bad").config.layers == 1
    change, says = BROKEN[case]
    change(tmp_path / "bad")
    with pytest.raises(ModelError) as refused:
        hf.check_directory(tmp_path / "bad")
    assert str(refused.value).startswith(str(tmp_path / "bad")) and "\n" not in str(refused.value)
    assert says in str(refused.value)


def test_a_second_copy_of_tied_embeddings_may_be_in_fp8(tmp_path):
    peer_of(QWEN | {"num_hidden_layers": 1, "tie_word_embeddings": True}, tmp_path)
    meant = to_fp8(tmp_path)
    stored, scales = quantize(meant["model.embed_tokens.weight"], (16, 16))
    numbers = stored.float() * spread(scales, (16, 16), stored.shape)
    head = {"lm_head.weight": stored, "lm_head.weight_scale_inv": scales}
    _tensors(tmp_path, lambda t: t.update(head | {"model.embed_tokens.weight": numbers}))
    assert hf.check_directory(tmp_path).config.tied
    _tensors(tmp_path, lambda t: t["lm_head.weight_scale_inv"].mul_(2))
    with pytest.raises(ModelError, match=r"lm_head.weight is not model.embed_tokens.weight"):
        hf.check_directory(tmp_path)
    _tensors(tmp_path, lambda t: t.pop("lm_head.weight_scale_inv"))
    with pytest.raises(ModelError, match=r"its scales, lm_head.weight_scale_inv, are missing"):
        hf.check_directory(tmp_path)


def test_the_module_of_transformers_reads_fp8(tmp_path):
    raw = {"model_type": "gpt_neox", "num_hidden_layers": 1}
    fp8, plain = directories(raw, tmp_path)
    model = hf.check_directory(fp8, "hf")
    assert same(hf.load(fp8, model=model)[1], hf.load(plain, model=hf.check_directory(plain, "hf"))[1])
    hf.save(tmp_path / "saved", model, hf.load(fp8, model=model)[1])
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    assert SMALL["hidden_size"] == model.config.embed
