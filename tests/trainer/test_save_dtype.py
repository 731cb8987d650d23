"""The dtype in which a run, and `funrl export`, save a model: that in which it came, or that of a flag."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import funrl
from funrl import trees
from funrl.cli import main as cli
from funrl.models.errors import ModelError
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.names import names_of
from funrl.tasks import arithmetic

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
RUN = {
    "steps": 1,
    "batch_prompts": 2,
    "samples_per_prompt": 2,
    "max_new_tokens": 3,
    "eval_prompts": 2,
    "lr": 1e-2,
    "device": "cpu",
    "prompts": [{"prompt": f"{i}+{i + 3}="} for i in range(4)],
    "save_every": 1,
}


def ones(prompt, completion):
    return completion.count("1") / 3


def saved(folder):
    """What config.json says, and what the files are."""
    raw = json.loads((Path(folder) / "config.json").read_text())
    return (
        raw["dtype"],
        raw["torch_dtype"],
        {str(x.dtype)[6:] for x in load_file(f"{folder}/model.safetensors").values()},
    )


def given(folder, dtype):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("llama", vocab_size=len(arithmetic.tokenizer()), **SIZES)
    transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    arithmetic.tokenizer().save_pretrained(folder)
    return str(folder)


def in_files(model, params):
    """Weights by the names, and in the shapes, of files."""
    return [(names_of(model)[name][0], x.reshape(names_of(model)[name][1])) for name, x in trees.named(params)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "flags", "expected"),
    [
        (torch.bfloat16, {"dtype": "bfloat16"}, "bfloat16"),
        (torch.bfloat16, {"dtype": "float32", "lora_rank": 2}, "bfloat16"),
        (torch.float32, {"dtype": "bfloat16"}, "float32"),
        (torch.float16, {"dtype": "float32"}, "float16"),
        (torch.bfloat16, {"dtype": "float32", "save_dtype": "float32"}, "float32"),
        (None, {"dtype": "bfloat16", "warmstart_steps": 0}, "float32"),
        (None, {"dtype": "float64", "warmstart_steps": 0}, "float64"),
        (None, {"dtype": "float32", "warmstart_steps": 0, "save_dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_a_model_is_saved_as_it_came_or_as_the_flag_says(dtype, flags, expected, tmp_path):
    if dtype is not None:
        flags = flags | {"model": given(tmp_path / "given", dtype)}
    run = funrl.train("grpo", reward=ones, run_dir=str(tmp_path / "run"), **RUN | flags)
    assert saved(tmp_path / "run" / "model") == (expected, expected, {expected})

    export = ["funrl", "export", str(tmp_path / "run"), f"--to={tmp_path / 'out'}"]
    assert cli.main(export) == 0 and saved(tmp_path / "out") == (expected, expected, {expected})
    masters = "float64" if flags["dtype"] == "float64" else "float32"
    assert cli.main([*export, "--overwrite", f"--save_dtype={masters}"]) == 0
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert saved(tmp_path / "out") == (masters, masters, {masters})
    for name, x in load_file(tmp_path / "run" / "model" / "model.safetensors").items():  # from the masters
        assert torch.equal(x, exported[name].to(x.dtype))
    assert expected == masters or any(
        not torch.equal(x, x.to(getattr(torch, expected)).to(x.dtype)) for x in exported.values()
    )
    assert len(run.model.generate(["1+4="], max_new_tokens=2)) == 1


def test_adapters_have_no_dtype_to_choose(tmp_path, capsys):
    assert cli.main(["funrl", "export", str(tmp_path), "--save_dtype=int8"]) == 2
    assert "it must be one of float32, bfloat16, float16, float64" in capsys.readouterr().err


def test_weights_that_stay_wide_do_in_files(tmp_path):
    latent = dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8)
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
    raw = SIZES | latent | experts | {"vocab_size": 32, "num_key_value_heads": 2, "first_k_dense_replace": 1}
    config = transformers.AutoConfig.for_model("deepseek_v3", **raw)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "theirs")
    model, params = hf.load(tmp_path / "theirs")
    hf.write(tmp_path / "ours", model, in_files(model, params), dtype="bfloat16")
    written = load_file(tmp_path / "ours" / "model.safetensors")
    wide = [name for name, x in written.items() if x.dtype == torch.float32]
    assert wide == ["model.layers.1.mlp.gate.e_score_correction_bias"] and len(written) > 20
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_text_config_of_a_model_with_pictures_has_the_dtype_too():
    raw = {
        "model_type": "x",
        "text_config": {"dtype": "float32", "torch_dtype": "float32"},
        "vision_config": {"depth": 1},
    }
    expected = {"model_type": "x", "text_config": {"dtype": "bfloat16", "torch_dtype": "bfloat16"}}
    expected |= {"vision_config": {"depth": 1}, "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    assert hf._with_dtype(raw, "bfloat16") == expected


def test_a_number_that_has_no_place_in_float16_is_not_written(tmp_path):
    model, params = hf.load(given(tmp_path / "given", torch.float32))
    params["norm"][0] = 1e5
    with pytest.raises(ModelError, match=r"1 numbers of model\.norm\.weight are beyond the largest of float16"):
        hf.write(tmp_path / "ours", model, in_files(model, params), dtype="float16")
