"""Rows for tokens that only the tokenizer has: the mean of the others, saved with the model."""

import json

import pytest
import torch
from own_parts import own_part

from funrl.cli import main as cli
from funrl.cli.run import main
from funrl.data.tokenizer import character_tokenizer
from funrl.mesh.mesh import parse
from funrl.mesh.rules import STORED, fully_sharded, layouts
from funrl.models import decoder_config, decoder_model, with_value_head
from funrl.models.errors import ModelError
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.resize import with_vocabulary

SIZES = {"embed": 8, "layers": 1, "heads": 2, "kv_heads": 2, "head": 4, "mlp": 8, "max_positions": 32, "eos": (1,)}


def directory(folder, tied, tokens="0123456789+="):
    """A model whose tokenizer has had a padding token added behind the vocabulary."""
    tokenizer = character_tokenizer(tokens)
    model = decoder_model(decoder_config(vocab=len(tokenizer), tied=tied, **SIZES))
    params = model.init(torch.Generator().manual_seed(0))
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    hf.save(folder, model, params, tokenizer)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "pad_token_id": None}))
    return model, params


@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_are_the_mean_and_the_others_stay(tied, tmp_path):
    _, params = directory(tmp_path, tied)
    larger = with_vocabulary(hf.check_directory(tmp_path), 18)
    assert larger.config.vocab == 18 and with_vocabulary(larger, 5) is larger
    _, read = hf.load(tmp_path, torch.float64, model=larger)
    for name in ("embed",) if tied else ("embed", "unembed"):
        assert torch.equal(read[name][:14], params[name].double())
        mean = params[name].double().mean(0).float()  # in the dtype of the files, as other rows
        assert torch.equal(read[name][14:], mean.double().expand(4, -1))
    assert torch.equal(read["norm"], params["norm"].double()) and (tied == ("unembed" not in read))
    valued = hf.load(tmp_path, torch.float64, model=larger)[0]
    assert with_value_head(valued).shapes["decoder"]["embed"].shape == (18, 8)


def test_every_rank_reads_its_own_part(tmp_path):
    directory(tmp_path, tied=False)
    larger, sizes = with_vocabulary(hf.check_directory(tmp_path), 16), parse("dp2,tp2")
    _, whole = hf.load(tmp_path, torch.float32, model=larger)
    result = layouts(larger.shapes, larger.axes, fully_sharded(STORED), sizes)
    for rank in range(4):
        own = own_part(tmp_path, larger, torch.float32, result, rank)
        for name in ("embed", "unembed"):
            box = tuple(slice(*ends) for ends in result[name].box(rank))
            assert torch.equal(own[name], whole[name][box])


def test_transformers_own_code_is_left_to_transformers(tmp_path):
    directory(tmp_path, tied=True)
    model = hf.check_directory(tmp_path, "hf")
    with pytest.raises(ModelError, match=r"14 token ids and the tokenizer 15; .* resize_token_embeddings"):
        with_vocabulary(model, 15)


@pytest.mark.slow
def test_a_run_adds_them_and_transformers_opens_what_it_saves(tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory(tmp_path / "model", tied=False)
    (tmp_path / "p.jsonl").write_text("".join(f'{{"prompt": "{i}+{i}="}}\n' for i in range(1, 9)))
    (tmp_path / "r.py").write_text("def digits(prompt, completion):\n    return completion.count('1')\n")
    flags = [f"--model={tmp_path}/model", f"--prompts={tmp_path}/p.jsonl", f"--reward={tmp_path}/r.py:digits"]
    flags += ["--steps=1", "--save_every=1", "--batch_prompts=4", "--samples_per_prompt=2", "--max_new_tokens=4"]
    flags += ["--device=cpu", "--eval_prompts=2", "--reward_workers=0", f"--run_dir={tmp_path}/run"]
    assert main("grpo", ["grpo", *flags]) == 2
    assert "the pad_token_id of the tokenizer is 14, but the model has token ids below 14" in (
        errors := capsys.readouterr().err
    ) and errors.rstrip().endswith("or add rows with --resize_vocab")
    assert main("grpo", ["grpo", *flags, "--resize_vocab"]) == 0, capsys.readouterr().err
    assert cli.main(["funrl", "export", str(tmp_path / "run"), f"--to={tmp_path}/exported"]) == 0
    for folder in (tmp_path / "run/model", tmp_path / "exported"):
        tokenizer, opened = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
        assert opened.get_input_embeddings().weight.shape[0] == len(tokenizer) == 15 == tokenizer.pad_token_id + 1
        assert opened.lm_head.weight.shape[0] == 15
