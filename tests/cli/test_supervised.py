"""Runs on given texts: what stops them, and the rewards of a saved reward model in transformers."""

import json
import math

import pytest
import torch
from selection import quick

from funrl.cli.run import main
from funrl.data.supervised import load_examples, text_batch
from funrl.data.tokenizer import load_tokenizer
from funrl.models import decoder_model, place
from funrl.models.huggingface import directories as hf
from funrl.tasks import arithmetic

NAMES = ("sft", "dpo", "reward_model")


def run(name, *flags):
    tiny = ("--device=cpu", "--compile=off", "--warmstart_steps=0", "--batch_prompts=4", "--eval_prompts=8")
    return main(name, [name, *tiny, *flags])


@pytest.mark.parametrize("name", quick(NAMES, NAMES[:1]))
def test_a_loss_that_is_not_finite_ends_the_run_before_the_update(name, tmp_path, capsys):
    assert run(name, "--steps=5", "--lr=1e30", f"--run_dir={tmp_path}") == 1
    captured = capsys.readouterr()
    role = "reward_model" if name == "reward_model" else "policy"
    assert captured.err.startswith(f"error: step 4, {role}: the gradient's norm is ") and "lower --lr" in captured.err
    assert "Traceback" not in captured.err and str(tmp_path / "report.html") in captured.out
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["update/skipped"] for row in rows] == [0, 1, 1, 1] and math.isfinite(rows[0]["train/loss"])
    tensors = torch.cat([x.flatten() for x in weights(tmp_path / "model").values()])
    assert tensors.isfinite().all() and tensors.abs().max() > 1e20  # those of step 1


@pytest.mark.parametrize(
    "broken, message", [(0, "before the first step"), (1, "after step 1; a lower --lr may prevent")]
)
def test_a_held_out_loss_that_is_not_finite_ends_the_run(broken, message, tmp_path, capsys, monkeypatch):
    from funrl.trainer.sources import texts

    calls, loss_value = [], texts.loss_value

    def evaluated(*arguments, **options):
        calls.append(1)
        metrics, value = loss_value(*arguments, **options)
        return metrics, value * (math.nan if len(calls) == broken + 1 else 1)

    monkeypatch.setattr(texts, "loss_value", evaluated)
    assert run("sft", "--steps=1", f"--run_dir={tmp_path}") == 1
    assert f"the held-out loss is nan {message}" in capsys.readouterr().err


def test_a_text_that_is_too_long_is_refused_and_the_longest_that_fits_is_trained_on(tmp_path, capsys):
    file = tmp_path / "d.jsonl"
    lines = [{"prompt": "1+1=", "completion": "2" * digits} for digits in (1, 59, 60)]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert run("sft", f"--data={file}", "--steps=1", f"--run_dir={tmp_path / 'long'}") == 2
    errors = capsys.readouterr().err
    assert f"{file}, line 3: the text has 65 tokens, but the model has 64 positions; --long_prompts=drop" in errors
    assert "(it begins '1+1=22" in errors and not (tmp_path / "long").exists()
    file.write_text("\n".join(map(json.dumps, lines[:2])))
    assert run("sft", f"--data={file}", "--steps=1", f"--run_dir={tmp_path / 'fits'}") == 0


@pytest.mark.parametrize("padding", ["its own", "the end of text", "none"])
def test_a_reward_model_has_the_same_rewards_of_a_padded_batch_in_transformers(padding, tmp_path, capsys):
    """Whether the texts of the batch end with the end-of-text token only matters where that token does not pad."""
    from transformers import AutoModelForSequenceClassification

    model, tokenizer = decoder_model(arithmetic.model_config()), arithmetic.tokenizer()
    tokenizer.pad_token = {"its own": tokenizer.pad_token, "the end of text": tokenizer.eos_token, "none": None}[
        padding
    ]
    hf.save(tmp_path / "own", model, model.init(torch.Generator().manual_seed(0)), tokenizer)
    file = tmp_path / "d.jsonl"
    records = [{"prompt": f"{i}+{i}=", "chosen": str(2 * i)[::-1], "rejected": str(i)} for i in range(1, 40, 6)]
    file.write_text("\n".join(map(json.dumps, records)))
    flags = (f"--model={tmp_path / 'own'}", f"--data={file}", "--steps=3", "--lr=0.01", f"--run_dir={tmp_path / 'run'}")
    assert run("reward_model", *flags) == 0, capsys.readouterr().err

    folder = tmp_path / "run" / "model"
    theirs, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), load_tokenizer(folder)
    assert theirs.config.pad_token_id == tokenizer.pad_token_id == (0 if padding == "its own" else 1)
    examples = load_examples(file, "preferences", tokenizer)
    batch = text_batch(examples, tokenizer.pad_token_id, reader=True)
    model, params = hf.load(folder, torch.float32)
    ours = place(model).values(params, batch)[batch.mask].tolist()
    assert len({round(x, 6) for x in ours}) > 10  # they differ

    texts = [record["prompt"] + record[name] for record in records for name in ("chosen", "rejected")]
    ends = (tokenizer.eos_token,) if padding == "its own" else (tokenizer.eos_token, "")
    for end in ends:
        rows = tokenizer([text + end for text in texts], padding=True, padding_side="right", return_tensors="pt")
        assert (rows["attention_mask"] == 0).any()
        with torch.no_grad():
            logits = theirs(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits[:, 0]
        assert logits.tolist() == pytest.approx(ours, abs=1e-5)


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")
