"""Names of TRL and verl: their errors on the command line and in Python, and `funrl import`."""

import ast
import json
import re
from pathlib import Path

import pytest

import funrl
from funrl.algos.recipes import NAMES, recipe
from funrl.cli import main as cli
from funrl.cli import run
from funrl.cli.command import Experiment, read_command
from funrl.cli.import_config import imported
from funrl.flags import foreign
from funrl.flags.config_file import read_config
from funrl.flags.foreign.meaning import NameContext
from funrl.flags.foreign.trl import TEXT_RECIPES
from funrl.flags.foreign.verl import VERL
from funrl.trainer.settings.declaration import SettingsError, kinds_of
from funrl.trainer.settings.settings import flag_values

PRESETS = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


def read(name, *argv):
    return read_command(Experiment(name, name, {}), [name, *argv], writes=True)


@pytest.mark.parametrize(
    ("name", "argv", "ours"),
    [
        (
            "grpo",
            "--learning_rate 1e-5 --num_generations=4 --max_completion_length=5 --seed=2",
            {"lr": 1e-5, "samples_per_prompt": 4, "max_new_tokens": 5, "seed": 2},
        ),
        (
            "grpo",
            "--beta=0.5 --epsilon=0.1 --epsilon_high=0.3 --delta=4",
            {"kl_coef": 0.5, "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 4.0},
        ),
        ("grpo", "--epsilon=0.1 --loss_type=dapo", {"clip_low": 0.1, "clip_high": 0.1, "per_sequence": False}),
        ("grpo", "--bf16 --gradient_checkpointing true", {"dtype": "bfloat16", "remat": "full"}),
        ("grpo", "--bf16=False --gradient_checkpointing=False", {"dtype": "float32", "remat": "none"}),
        # 8 x 4 x 2 ranks = 64 completions, 4 of a prompt; two steps of accumulation are an update, so two updates
        (
            "grpo",
            "--per_device_train_batch_size=8 --gradient_accumulation_steps=2 --steps_per_generation=4 "
            "--num_generations=4 --mesh=dp2,tp2 --max_steps=10 --warmup_ratio=0.2",
            {"batch_prompts": 16, "minibatches": 2, "steps": 5, "lr_warmup_steps": 2},
        ),
        (
            "sft",
            "--per_device_train_batch_size=8 --gradient_accumulation_steps=2 --max_steps=9",
            {"batch_prompts": 16, "steps": 9},
        ),
        (
            "dpo",
            "--beta=0.5 --label_smoothing=0.1 --loss_type=exo_pair",
            {"beta": 0.5, "smoothing": 0.1, "loss": "exo"},
        ),
        ("dpo", "--f_divergence_type=js_divergence", {"divergence": "js"}),
        (
            "sft",
            "--packing=true --lr_scheduler_type=constant_with_warmup --warmup_steps=3 --save_steps=7",
            {"lr_schedule": "constant", "lr_warmup_steps": 3, "save_every": "7"},
        ),
    ],
)
def test_names_of_trl_are_refused_with_the_flags_that_mean_the_same(name, argv, ours):
    with pytest.raises(SettingsError) as caught:
        read(name, *argv.split())
    *lines, last = str(caught.value).splitlines()
    text = last.removeprefix("together: ") if lines else re.sub(r" \(.*", "", last.partition(": write ")[2])
    own = ("--seed", "--mesh") + ("--beta",) * (name == "dpo")
    given = [word for word in argv.split() if word.startswith("--")]
    kept = [word for word in given if word.startswith(own)]
    command = read(name, *text.split(), *kept)
    values = flag_values(command.settings) | dict(command.arguments)
    assert {key: values[key] for key in ours} == ours
    theirs = {word.split("=")[0] for word in given if word not in kept}
    assert {line.split("=")[0] for line in (lines or [last])} == theirs


def test_a_name_is_answered_with_the_exact_flag_to_write(tmp_path, capsys):
    assert run.main("grpo", ["grpo", "--num_generations=4", f"--run_dir={tmp_path / 'run'}"]) == 2
    assert capsys.readouterr().err == "error: --num_generations=4 is TRL's name: write --samples_per_prompt=4\n"
    assert not (tmp_path / "run").exists()
    with pytest.raises(SettingsError) as caught:
        read("grpo", "--num_generations=4", "--bf16", "--logging_steps=1", "--lr=1e-4")
    assert str(caught.value).splitlines() == [
        "--num_generations=4 is TRL's name: write --samples_per_prompt=4",
        "--bf16=true is TRL's name: write --dtype=bfloat16",
        "--logging_steps=1 is TRL's name: metrics are written after every step; leave it out",
        "together: --samples_per_prompt=4 --dtype=bfloat16",
    ]


def test_a_file_with_names_of_trl_is_to_be_imported(tmp_path):
    (tmp_path / "t.yaml").write_text("learning_rate: 1e-5\nsteps: 3\n")
    with pytest.raises(SettingsError, match=r"(?s)write --lr=1e-5.*`funrl import .*t.yaml` translates the whole file"):
        read("grpo", f"--config={tmp_path / 't.yaml'}")


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"num_generations": 4}, "num_generations is TRL's name: write samples_per_prompt=4"),
        ({"bf16": True}, "bf16 is TRL's name: write dtype='bfloat16'"),
        ({"loss_type": "dapo"}, "loss_type is TRL's name: write per_sequence=False"),
        ({"learning_rate": 1e-4, "beta": 0.1}, r"together: lr=0.0001, kl_coef=0.1"),
        ({"num_train_epochs": 3}, "num_train_epochs is TRL's name: the length of a run is steps here"),
        ({"use_peft": True}, "write lora_rank=16, lora_alpha=32.0"),
        ({"ppo_mini_batch_size": 16}, "ppo_mini_batch_size is verl's name: write minibatches=8 "),
        ({"adv_estimator": "gae"}, "adv_estimator is verl's name: write the recipe 'ppo'"),
        ({"actor_rollout_ref.actor.optim.lr": 1e-6}, "verl's name: write lr=1e-06"),
        ({"gamma": 0.9}, "gamma=0.9: there is no such setting; it is an argument of .*ppo.*, and grpo has none"),
        ({"learnign_rate": 1e-4}, "learnign_rate=0.0001.*did you mean TRL's learning_rate. Here it is lr=0.0001"),
        ({"LR": 1}, "did you mean lr?"),
        ({"nofsdp": True}, r"nofsdp=true: there is no such setting; did you mean fsdp\?"),
        ({"frobnicate": "exact"}, "frobnicate=exact: there is no such setting; `funrl grpo --help` lists all"),
        ({"learning_rate": "fast"}, "its value is none of ours: lr=fast: a number is needed"),
        ({"zzzz": 1}, "zzzz=1: there is no such setting; `funrl grpo --help` lists all"),
    ],
)
def test_python_answers_as_the_command_line_does(keywords, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=message):
        funrl.train("grpo", **keywords)
    assert not list(tmp_path.iterdir())


def test_commands_without_a_run_answer_with_their_own_flags(tmp_path, capsys):
    assert cli.main(["funrl", "evaluate", "model", "--max_completion_length=4"]) == 2
    assert "is TRL's name: write --max_new_tokens=4" in capsys.readouterr().err
    assert cli.main(["funrl", "evaluate", "model", "--run_name=4"]) == 2  # a name that only a run answers
    assert "--run_name is not a flag" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "flag", "message"),
    [
        ("grpo", "--num_train_epochs=3", "--num_train_epochs=3 is TRL's name: the length of a run is --steps here"),
        ("grpo", "--logging_steps=10", "written after every step; leave it out"),
        ("grpo", "--loss_type=dr_grpo", "dapo and bnpo are `funrl grpo --noper_sequence`.*this is grpo"),
        ("grpo", "--max_length=9", "the limits are --max_prompt_tokens and --max_new_tokens"),
        ("sft", "--max_prompt_length=9", "together is --max_text_tokens"),
        ("grpo", "--per_device_train_batch_size=3", r"--batch_prompts \(3 completions / 8\) would be 0.375"),
        ("grpo", "--fp16=true", "there is no float16; --dtype=bfloat16"),
        ("grpo", "--dataset_name=trl-lib/tldr", "neither a file nor a directory.*--prompts=PATH"),
        ("dpo", "--dataset_name=trl-lib/tldr", "--data=PATH"),
        ("gspo", "--delta=3", "gspo has no --dual_clip"),
        ("sft", "--beta=0.1", "sft has no KL to a reference"),
        ("grpo", "--use_peft", "write --lora_rank=16 --lora_alpha=32"),
        ("grpo", "--lora_r=4 --lora_alpha=8", r"write --lora_rank=4 \(TRL's"),
        ("grpo", "--lora_target_modules=['q_proj','v_proj']", "write --lora_targets=q_proj,v_proj"),
        ("grpo", "--dataset_test_split=test", "a split is a part of the dataset's name: --eval_data=NAME:test"),
        ("sft", "--dataset_train_split=t", "a split is a part of the dataset's name: --data=NAME:t"),
        ("grpo", "--load_in_8bit", "whole weights are not quantized, the base of adapters is: --base_format=nf4"),
        ("grpo", "--trust_remote_code=true", "is never run; --model_code=hf"),
        (
            "grpo",
            "--learnign_rate=1e-4",
            r"--learnign_rate is not a flag; did you mean TRL's learning_rate\? Here it is --lr=1e-4",
        ),
        ("grpo", "--frobnicate=exact", "--frobnicate is not a flag; --help"),
        ("grpo", "--learnign_rate=fast", "--learnign_rate is not a flag; --help"),
        ("grpo", "--num_iterations=exact", "TRL's name: its value is none of ours: --epochs=exact: a whole number"),
        ("grpo", "--top_entropy_quantile=0.2", "`keep_highest_entropy\\(\\)` of docs/pieces.md does it"),
        ("grpo", "--reward_funcs=own_file.py:f,it's.py:g", r"write --reward='own_file.py:f,it'\"'\"'s.py:g'"),
        ("grpo", "--LR=3", r"--LR is not a flag; did you mean --lr\?"),
        ("grpo", "--gamma=3", "--gamma is not a flag; it is an argument of .*ppo, .*and grpo has none"),
        ("grpo", "--stesp=3", r"--stesp is not a flag; did you mean --steps\?"),
        ("grpo", "actor_rollout_ref.actor.optim.lr=1e-6", "is verl's name: write --lr=1e-6"),
        ("grpo", "algorithm.adv_estimator=gae", "is verl's name: write `funrl ppo`"),
        ("grpo", "--ppo_mini_batch_size=16", "is verl's name: write --minibatches=8 "),
        ("grpo", "+trainer.total_epochs=3", "trainer.total_epochs=3 is verl's name: a run's length is --steps here"),
        ("grpo", "a.b=3", "flags have no dots; `funrl import FILE`"),
    ],
)
def test_what_has_no_equal_is_answered_with_what_there_is(name, flag, message):
    with pytest.raises(SettingsError, match=message):
        read(name, *flag.split())


def test_every_piece_that_an_answer_names_exists():
    """What stands between backquotes, with its arguments or without, is a recipe or a piece."""
    texts = []
    for file in Path(foreign.__path__[0]).glob("*.py"):
        tree = ast.parse(file.read_text())
        documented = (ast.Module, ast.FunctionDef, ast.ClassDef)
        docs = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, documented) and ast.get_docstring(node)
        }
        strings = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
        texts += [node.value for node in strings if id(node) not in docs]
    named = {name for text in texts for name in re.findall(r"`(\w+)(?:\([^`]*\))?`", text)}
    assert {"adaptive_entropy_bonus", "adapt_entropy", "keep_highest_entropy", "corrected"} <= named
    assert [name for name in named if name not in NAMES and not callable(getattr(funrl.algos, name, None))] == []


def test_recipes_of_texts_are_known_by_name():
    assert {name for name in NAMES if kinds_of(recipe(name)()) == ("supervised",)} == TEXT_RECIPES


TRL = """
model_name_or_path: {model}
learning_rate: 2.0e-6
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
max_prompt_length: 512
logging_steps: 10
unheard_of: 3
"""
VERL_FILE = """
defaults: [actor]
data: {train_files: [a.parquet, b.parquet], train_batch_size: 64, max_response_length: 100}
actor_rollout_ref:
  model: {path: m}
  actor:
    ppo_mini_batch_size: 16
    ppo_epochs: ${.again}
    again: 2
    use_kl_loss: True
    kl_loss_coef: 0.002
    kl_loss_type: low_var_kl+
    loss_agg_mode: ${oc.select:nowhere,seq-mean-token-mean}
  rollout: {n: 4, name: "???", tensor_model_parallel_size: 4, temperature: 0.7, top_k: -1}
algorithm: {adv_estimator: grpo}
trainer: {n_gpus_per_node: 8, nnodes: 2, total_epochs: 15, save_freq: 20}
"""
SCRIPT = """
set -x
LR=3e-6
python3 -m verl.trainer.main_ppo data.train_batch_size=64 \\
    +actor_rollout_ref.actor.optim.lr=$LR algorithm.adv_estimator=gae algorithm.lam=0.9 \\
    trainer.n_gpus_per_node=1 actor_rollout_ref.rollout.tensor_model_parallel_size=1  # and so on
"""


@pytest.mark.parametrize(
    ("file", "text", "flags", "differences"),
    [
        (
            "t.yaml",
            TRL + "num_generations: 16\nbeta: 0.04\n",
            {
                "experiment": "grpo",
                "lr": "2.0e-6",
                "samples_per_prompt": "16",
                "batch_prompts": "2",
                "minibatches": "1",
                "kl_coef": "0.04",
                "per_sequence": "false",
                "dual_clip": "none",
                "max_new_tokens": "512",
                "dtype": "bfloat16",
                "remat": "full",
                "lr_schedule": "linear",
            },
            {
                "max_prompt_length=512": "--long_prompts",
                "unheard_of=3": "unknown",
                "gradient_accumulation_steps=4": "counts completions",
                "num_train_epochs=3.0 (default)": "--steps",
            },
        ),
        (
            "t.yaml",
            TRL + "beta: 0.2\nloss_type: [ipo]\nf_divergence_type: reverse_kl\n",
            {"experiment": "dpo", "batch_prompts": "32", "beta": "0.2", "loss": "ipo", "lr": "2.0e-6"},
            {},
        ),
        (
            "t.json",
            json.dumps({"num_generations": 8, "loss_type": "dr_grpo", "scale_rewards": False, "bf16": None}),
            {"experiment": "dr_grpo", "max_new_tokens": "512"},
            {},
        ),
        (
            "v.yaml",
            VERL_FILE,
            {
                "experiment": "grpo",
                "mesh": "dp16",
                "generate_mesh": "dp4,tp4",
                "fsdp": "true",
                "prompts": "a.parquet,b.parquet",
                "batch_prompts": "64",
                "minibatches": "4",
                "epochs": "2",
                "kl_coef": "0.002",
                "kl_kind": "k3+",
                "per_sequence": "true",
                "top_k": "0",
                "temperature": "0.7",
                "save_every": "20",
                "max_new_tokens": "100",
                "lr": "1e-6",
                "weight_decay": "0.01",
            },
            {"trainer.total_epochs=15": "--steps", "actor_rollout_ref.actor.kl_loss_coef=0.002": "clamps k3"},
        ),
        (
            "v.sh",
            SCRIPT + "data.train_batch_size=512",
            {
                "experiment": "ppo",
                "lr": "3e-6",
                "gae_lambda": "0.9",
                "kl_coef": "0.0",
                "mesh": "dp1",
                "minibatches": "2",
                "value_clip": "0.5",
                "critic_lr": "1e-5",
            },
            {},
        ),
    ],
)
def test_a_configuration_of_theirs_is_a_file_of_flags_and_a_table(file, text, flags, differences, tmp_path, capsys):
    (tmp_path / file).write_text(text.replace("{model}", "m"))
    translation = imported(str(tmp_path / file))
    assert {name: translation.flags.get(name) for name in flags} == flags
    for theirs, difference in differences.items():
        (row,) = [row for row in translation.rows if theirs in row.theirs.split(", ")]
        assert difference in row.difference
    assert cli.main(["funrl", "import", str(tmp_path / file), "--partial", f"--to={tmp_path / 'ours.yaml'}"]) == 0
    assert "--config=" in capsys.readouterr().out
    assert read_config(str(tmp_path / "ours.yaml")).flags() == [
        f"--{k}={v}" for k, v in translation.flags.items() if k != "experiment"
    ]
    more = [f"--{name}=none" for name in ("model", "prompts") if name in translation.flags]
    command = read(translation.flags["experiment"], f"--config={tmp_path / 'ours.yaml'}", *more)
    assert command.settings.devices.remat in ("full", "none")
    assert all(dict(command.arguments)[name] is None for name, text in flags.items() if text == "none")


def test_import_refuses_what_it_cannot_read(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("algorithm: {adv_estimator: grpo_passk}")
    assert cli.main(["funrl", "import", str(tmp_path / "a.yaml")]) == 2
    assert "adv_estimator=grpo_passk with loss_mode=vanilla" in capsys.readouterr().err
    assert cli.main(["funrl", "import"]) == 2 and "usage: funrl import" in capsys.readouterr().err


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_a_preset_is_a_command(preset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text("")
    (tmp_path / "r.py").write_text("def f(prompt, completion):\n    return 0\n")
    given = [f"--model={tmp_path}", "--prompts=p.jsonl", "--reward=r.py:f"]  # its own is in no cache here
    command = read("grpo", f"--config={preset}", *given)
    assert command.settings.models.dtype == "bfloat16" and len(PRESETS) == 5


@pytest.mark.parametrize("place", ["custom_reward_function", "reward.custom_reward_function"])
def test_a_reward_of_verl_is_found_in_either_place(place):
    context = NameContext({f"{place}.path": "r.py", f"{place}.name": "f"}, {"reward": None}, frozenset(), "grpo")
    assert VERL.meaning(f"{place}.path", "r.py", context).flags == {"reward": "r.py:f"}
