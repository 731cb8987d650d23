"""Flags that do not go together, and files that are not there."""

import re

import pytest

from funrl.trainer.settings.checks import check_files, check_settings, weights_of_rewards
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import settings_of

TOGETHER = [  # settings that cannot work, and the message's beginning or its way out
    ({"fsdp_axes": "dp"}, "--fsdp_axes=dp does nothing without --fsdp; give --fsdp too"),
    ({"hardware": "h200"}, "--hardware=h200 does nothing without --dry_run; give --dry_run too"),
    ({"text_tokens": 9}, "--text_tokens=9 does nothing without --dry_run"),
    ({"speculate": 3, "engine": "vllm"}, "--speculate=3 does nothing without --engine=native; leave it out"),
    ({"resume": True}, "--resume does nothing without --run_dir; give --run_dir too"),
    ({"temperature": 0.5, "top_k": 4}, "use either a temperature, or top_k at temperature 1"),
    ({"temperature": 0.5, "top_k": 4, "top_p": 0.9}, "--temperature=0.5 with --top_k=4 --top_p=0.9: the trainer needs"),
    ({"temperature": 0.5, "min_p": 0.1}, "log-probabilities before min_p, which it reports at temperature 1"),
    ({"temperature": 0.5, "repetition_penalty": 1.1}, "--temperature=0.5 with --repetition_penalty=1.1"),
    ({"lr_schedule": "cosine", "steps": 2, "lr_warmup_steps": 4}, "the run makes 4 updates"),
    ({"lr_schedule": "linear", "steps": 3, "critic_warmup_steps": 2, "lr_warmup_steps": 2}, "the run makes 2 updates"),
    ({"steps": 4, "critic_warmup_steps": 4}, "use fewer than --steps=4"),
    (
        {"minibatches": 9, "batch_prompts": 4, "samples_per_prompt": 2},
        "--minibatches=9: --batch_prompts x --samples_per_prompt is 8",
    ),
    (
        {"batch_prompts": 1, "samples_per_prompt": 1},
        "--batch_prompts x --samples_per_prompt is 1; give --minibatches=1",
    ),
    ({"mesh": "dp2", "generate_mesh": "dp3"}, "--generate_mesh=dp3 has 3 devices and --mesh=dp2 has 2"),
    ({"fsdp": True, "mesh": "tp2"}, "--fsdp does nothing without several devices to shard over (--mesh=tp2)"),
    (
        {"fsdp": True, "mesh": "dp2", "fsdp_axes": "ep"},
        "without several devices to shard over (--mesh=dp2)",
    ),
]


@pytest.mark.parametrize(("values", "says"), TOGETHER, ids=str)
def test_flags_that_do_not_go_together_are_refused(values, says):
    with pytest.raises(SettingsError, match=re.escape(says)):
        check_settings(settings_of(**values))


GOOD = [
    {},
    {"fsdp": True, "fsdp_axes": "dp", "mesh": "dp2,tp2"},
    {"dry_run": True, "hardware": "cpu"},
    {"resume": True, "run_dir": "r"},
    {"top_k": 4, "top_p": 0.9},
    {"temperature": 0.5},
    {"min_p": 0.1, "repetition_penalty": 1.1},
    {"eval_temperature": 0.5, "eval_min_p": 0.1},
    {"lr_schedule": "cosine", "steps": 2, "lr_warmup_steps": 3},
    {"lr_warmup_steps": 999},
    {"mesh": "dp128"},
    {"minibatches": 8, "batch_prompts": 4, "samples_per_prompt": 2},
    {"mesh": "dp4", "generate_mesh": "tp4"},
    {"mesh": "dp4,ep2", "batch_prompts": 1},
]


@pytest.mark.parametrize("values", GOOD, ids=str)
def test_flags_that_go_together_pass(values):
    check_settings(settings_of(**values), "rl")


SOURCES = [  # kind, settings, what is said; "" where they can work
    ("rl", {"model": "m"}, "--model=m needs --prompts=FILE.jsonl and --reward=FILE.py:function"),
    ("rl", {"reward": "r.py:f"}, "--reward=r.py:f needs --prompts=FILE.jsonl"),
    ("rl", {"prompts": "p"}, "--prompts=p needs --reward=FILE.py:function or --reward_model=DIR"),
    ("rl", {"model": "m", "prompts": "p", "reward_model": "d"}, ""),
    ("rl", {"model": "m", "dry_run": True}, ""),
    ("supervised", {"model": "m"}, "--model=m needs --data=FILE.jsonl"),
    ("supervised", {"model": "m", "data": "d"}, ""),
    (None, {"model": "m"}, ""),
    (
        "rl",
        {"reward_weights": "0"},
        "give one number for each of the rewards (1), separated by commas, not all 0",
    ),
    ("rl", {"reward_weights": "1,1"}, "give one number for each of the rewards (1)"),
    ("rl", {"prompts": "p", "reward": "r.py:f,r.py:g", "reward_weights": "1,-1"}, ""),
    ("rl", {"prompts": "p", "reward": "r.py:f", "reward_model": "d", "reward_weights": "1"}, "rewards (2)"),
    ("rl", {"prompts": "p", "reward": "r.py:f@0.5,format", "reward_model": "d"}, ""),
    ("rl", {"prompts": "p", "reward": "r.py:f@0.5,format", "reward_weights": "1,1"}, "gives weights too; give them in"),
    (
        "rl",
        {"prompts": "p", "reward": "r.py:f@0,format@0"},
        "--reward with weights=0,0: give one number for ",
    ),
    (
        "rl",
        {"prompts": "p", "reward_model": "d", "on_reward_error": "skip"},
        "=skip does nothing without a reward",
    ),
    (None, {"on_reward_error": "drop"}, "--on_reward_error=drop: it must be one of stop, zero, skip"),
]


@pytest.mark.parametrize(("kind", "values", "says"), SOURCES, ids=str)
def test_a_run_needs_something_to_learn_from(kind, values, says):
    if not says:
        return check_settings(settings_of(**values), kind)
    with pytest.raises(SettingsError, match=re.escape(says)):
        check_settings(settings_of(**values), kind)


@pytest.mark.parametrize(("text", "weights"), [(None, (1.0, 1.0)), ("2,-0.5", (2.0, -0.5)), ("0, 1", (0.0, 1.0))])
def test_weights_of_rewards(text, weights):
    assert weights_of_rewards(settings_of(reward_weights=text), 2) == weights


@pytest.mark.parametrize("text", ["1", "1,2,3", "1,x", "1,nan", "1,1e39", "0,-0"])
def test_weights_that_are_not_one_finite_number_each_are_refused(text):
    with pytest.raises(SettingsError, match=f"--reward_weights={text}: "):
        weights_of_rewards(settings_of(reward_weights=text), 2)


def test_files_must_be_there(tmp_path):
    (tmp_path / "there.jsonl").write_text("{}\n")
    for values, says in (
        (
            {"prompts": f"{tmp_path}/not.jsonl"},
            f"--prompts: {tmp_path}/not.jsonl: no such file; prompts are a .jsonl",
        ),
        ({"prompts": f"{tmp_path}/there.jsonl@1,{tmp_path}/not.csv@2"}, "not.csv: no such file"),
        ({"prompts": "a.jsonl@1,b.jsonl"}, "--prompts: a.jsonl@1,b.jsonl: give each file a weight"),
        ({"prompts": f"{tmp_path}/there.jsonl", "fields": "a"}, "--fields=a: write NAME:COLUMN"),
        ({"data": str(tmp_path)}, f"--data: {tmp_path}: this is a directory, and not one that `datasets`"),
        ({"model": f"{tmp_path}/not"}, f"--model: {tmp_path}/not is not a directory"),
        ({"teacher": "./not"}, "--teacher: ./not is not a directory"),
        ({"reward_model": f"{tmp_path}/there.jsonl"}, "is not a directory"),
        ({"reward": f"{tmp_path}/not.py:f"}, "not.py: no such file"),
        ({"reward": "f"}, "--reward=f: 'f' is not a verifier (exact, gsm8k"),
    ):
        with pytest.raises(ValueError, match=re.escape(says)):
            check_files(settings_of(**values))
    check_files(settings_of(prompts=f"{tmp_path}/there.jsonl", model=str(tmp_path), reward="math:sin,math:cos"))
    check_files(settings_of(model="Qwen/Qwen3-0.6B"))  # a name of the hub, which whoever loads it looks up
    check_files(settings_of(model=f"{tmp_path}/not", prompts="not", dry_run=True))  # which reads neither
