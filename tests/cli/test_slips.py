"""Slips on a command line and in data: each is refused or said, before anything is loaded where that is possible."""

import json
from typing import Any

import pytest
import torch

from funrl.algos import NAMES
from funrl.algos.recipes.grpo import grpo
from funrl.cli import run
from funrl.cli.run import main
from funrl.flags.arguments import arguments_of, find_recipe
from funrl.models import decoder_model
from funrl.models.huggingface import directories as hf
from funrl.tasks import arithmetic
from funrl.trainer.jobs.datasets import remarks_on_template
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.settings.declaration import RUN_KINDS
from funrl.trainer.settings.settings import settings_flags, settings_of

PROMPTS = [f"{a}+{b}=" for a in range(3, 8) for b in range(11, 15)]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A folder with a model, prompts and a reward."""
    folder = tmp_path_factory.mktemp("own")
    model = decoder_model(arithmetic.model_config())
    hf.save(folder / "model", model, model.init(torch.Generator().manual_seed(0)), arithmetic.tokenizer())
    write(folder / "p.jsonl", PROMPTS)
    write(folder / "chats.jsonl", [[{"role": "user", "content": prompt}] for prompt in PROMPTS])
    (folder / "r.py").write_text("def length(prompt, completion):\n    return len(completion)")
    return folder


def write(file, prompts):
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


OWN = ["--prompts={own}/p.jsonl", "--reward={own}/r.py:length"]
REFUSED = [
    ("grpo", ["--lr="], "--lr=: a number is needed; leave --lr out for its default, or write --lr=none"),
    ("grpo", ["--temperature="], "--temperature=: a number is needed; leave --temperature out for its default\n"),
    ("grpo", ["--lr=1e-9", "--lr=5e-3"], "--lr=1e-9 and --lr=5e-3: --lr is given twice"),
    ("grpo", ["--fsdp", "--nofsdp"], "--fsdp is given twice"),
    ("grpo", ["--kl_coef=-1"], "--kl_coef=-1: it must be at least 0"),
    ("ppo", ["--gamma=2"], "--gamma=2: it must be at least 0 and at most 1"),
    ("grpo", ["--critic_lr=5"], "--critic_lr=5 does nothing without a critic, which ppo, vapo and sao train"),
    ("grpo", ["--max_refills=2"], "--max_refills=2 does nothing without a filter of rows, which dapo has"),
    ("grpo", ["--lora_rank=10000"], "--lora_rank=10000: no matrix with adapters has a rank above 64"),
    ("grpo", ["--kv_cache_gb=100000"], "--kv_cache_gb=100000: a rank of this machine has "),
    (
        "grpo",
        ["--keep_checkpoints=3", "--save_every=0"],
        "does nothing without checkpoints (--save_every=0)",
    ),
    ("grpo", ["--split_residual=off"], "--split_residual=off does nothing without tp (--mesh=dp1)"),
    ("grpo", [*OWN, "--task=arithmetic"], "--task=arithmetic does nothing together with --prompts="),
    ("sft", ["--model={own}/model", "--warmstart_steps=3"], "--warmstart_steps=3 does nothing together with --model="),
    ("grpo", ["--model={own}/model", "--prompts={own}/chats.jsonl", OWN[1]], "give --chat_template=FILE.jinja"),
    (
        "grpo",
        ["--model={own}/model", *OWN, "--system_prompt=Add."],
        "does nothing without a chat template (--chat_template=FILE.jinja gives one)",
    ),
    (
        "grpo",
        ["--model={own}/model", "--resize_vocab"],
        "--resize_vocab does nothing without tokens that only the tokenizer has",
    ),
]
EARLY = [  # without the job, which reads models
    ("grpo", [OWN[0], "--reward={own}/r.py:lenght"], "has no 'lenght'; did you mean length? its functions: length"),
]


def refusal(program, flags, own, tmp_path, capsys):
    argv = [program, "--device=cpu", f"--run_dir={tmp_path / 'run'}", *(flag.format(own=own) for flag in flags)]
    assert main(program, argv) == 2 and not (tmp_path / "run").exists()
    return capsys.readouterr().err


@pytest.mark.parametrize(("program", "flags", "message"), REFUSED, ids=[flags[-1] for _, flags, _ in REFUSED])
def test_a_slip_is_refused(program, flags, message, own, tmp_path, capsys):
    assert message in refusal(program, flags, own, tmp_path, capsys)


@pytest.mark.parametrize(("program", "flags", "message"), EARLY, ids=[flags[-1] for _, flags, _ in EARLY])
def test_it_is_refused_before_anything_is_loaded(program, flags, message, own, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "_job", lambda command: pytest.fail("the job was made"))
    assert message in refusal(program, flags, own, tmp_path, capsys)


def test_none_is_no_value():
    lr = settings_flags()["lr"]
    assert lr.parse("none") is None and lr.parse("0.5") == 0.5


def test_a_coefficient_of_a_penalty_is_not_negative_in_any_recipe():
    coefficients = 0
    for name in NAMES:
        for argument, flag in arguments_of(find_recipe(name), name).flags.items():
            if argument.endswith("_coef") and argument not in ("entropy_coef", *settings_flags()):
                assert flag.problem(-1.0) == "it must be at least 0", (name, argument)
                coefficients += 1
    assert coefficients > 10


def test_what_is_declared_of_a_flag_exists():
    flags = settings_flags()
    for flag in flags.values():
        assert set(flag.unless) <= set(flags) and flag.requires in ("", *flags) and set(flag.kinds) <= set(RUN_KINDS)


def remarks(own, file="p.jsonl", **settings):
    given: dict[str, Any] = {"prompts": f"{own}/{file}", "reward": f"{own}/r.py:length", "device": "cpu"} | settings
    return prepare(settings_of(**given), grpo).task.remarks


def test_flags_that_reach_beyond_the_data_and_the_model_are_said(own):
    assert remarks(own) == ()
    assert remarks(own, eval_prompts=1000) == ("--eval_prompts=1000: there are 2 examples to evaluate on",)
    (remark,) = remarks(own, max_prompt_tokens=600)
    assert remark.startswith("--max_prompt_tokens=600 changes nothing: --max_new_tokens is 32 and the model has 64")


def test_prompts_that_are_trained_on_and_held_out_are_counted(own, tmp_path):
    write(tmp_path / "same.jsonl", ["1+1="] * 20)
    write(tmp_path / "few.jsonl", PROMPTS[:3])
    write(tmp_path / "half.jsonl", [*PROMPTS[:2], "9+9=", "8+8="])
    (same,) = remarks(tmp_path, "same.jsonl", reward=f"{own}/r.py:length")
    assert same.startswith("2 of the 2 held-out prompts are trained on too, word for word; --eval_data=FILE gives")
    (few,) = remarks(tmp_path, "few.jsonl", reward=f"{own}/r.py:length")
    assert few.startswith("3 of the 3 held-out prompts are trained on too, word for word (3 examples are too few")
    (whole,) = remarks(own, eval_data=f"{own}/p.jsonl")
    assert whole.startswith("20 of the 20 held-out prompts are trained on too, word for word; --eval_data=FILE gives")
    (half,) = remarks(own, eval_data=f"{tmp_path}/half.jsonl")
    assert half.startswith("2 of the 4 held-out prompts are trained on too")


def test_a_place_of_a_template_that_is_not_filled_is_said():
    (remark,) = remarks_on_template(settings_of(prompt_template="{prompt} {x}"))
    assert remark == "--prompt_template: {x} stays in every prompt as it is written; only {prompt} is replaced"
    assert remarks_on_template(settings_of(prompt_template=r"{prompt} Write \boxed{answer}, or {{answer}}.")) == []
