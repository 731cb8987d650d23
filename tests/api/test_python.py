"""`funrl.train` from Python: what it takes, where it runs, and what it gives back."""

import contextlib
import json
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from child_processes import children

import funrl
from funrl.algos import Algorithm, chain, clipped_surrogate, group_center, reduce, stateless, to_tokens, token_mean
from funrl.loading import LoadError
from funrl.mesh import launch
from funrl.models import Inputs, decoder_model, with_fields
from funrl.models.errors import ModelError
from funrl.models.huggingface import directories as hf
from funrl.processes import stall_monitor
from funrl.tasks import arithmetic
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import settings_of

TINY = {
    "steps": 2,
    "batch_prompts": 4,
    "samples_per_prompt": 2,
    "max_new_tokens": 4,
    "eval_prompts": 4,
    "device": "cpu",
}
PROMPTS = [{"prompt": f"{n}+{n}=", "wanted": str(n % 10)} for n in range(3, 23)]
TEXTS = [{"prompt": f"{n}+{n}=", "completion": str(2 * n)[::-1]} for n in range(3, 23)]
MESHES = pytest.mark.parametrize("mesh", ["dp1", pytest.param("dp2", marks=pytest.mark.gloo)])


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model(tmp_path):
    """A directory."""
    made = decoder_model(arithmetic.model_config())
    hf.save(tmp_path / "begin", made, made.init(torch.Generator().manual_seed(3)), arithmetic.tokenizer())
    return str(tmp_path / "begin")


def own_algorithm(factor):
    """GRPO without its deviation, in which a lambda and a closure over `factor` take part."""
    advantage = chain(group_center(), stateless(lambda x, batch: factor * x), to_tokens())
    return Algorithm(advantage, {"policy": reduce(clipped_surrogate(), token_mean())})


@MESHES
def test_a_recipe_by_name_on_the_embedded_task(mesh, tmp_path):
    log = tmp_path / "log"

    def on_step(step, metrics):
        with log.open("a") as file:
            file.write(f"{step} {metrics['reward/mean']} {os.getpid()}\n")

    run = funrl.train("grpo", mesh=mesh, warmstart_steps=1, on_step=on_step, **TINY)
    assert [row["step"] for row in run.metrics] == [1, 2]
    steps, rewards, processes = zip(*(line.split() for line in log.read_text().splitlines()), strict=True)
    assert steps == ("1", "2") and [float(x) for x in rewards] == [row["reward/mean"] for row in run.metrics]
    assert {int(x) == os.getpid() for x in processes} == {mesh == "dp1"}
    with open(f"{run.run_dir}/config.json") as file:
        config = json.load(file)["flags"]
    assert config["algorithm"] == "grpo" and config["mesh"] == mesh
    assert run.outcome.error is None and run.outcome.last["eval/reward"] == run.metrics[-1]["eval/reward"]


@pytest.mark.slow
@pytest.mark.gloo
def test_an_algorithm_with_a_lambda_prompts_in_memory_and_a_reward_that_is_a_closure():
    liked = {str(digit) for digit in (1, 2, 3)}

    def reward(prompt, completion, wanted):
        return sum(letter in liked for letter in completion) / 4 + (completion[:1] == wanted)

    run = funrl.train(
        own_algorithm(2.0), prompts=PROMPTS, reward=reward, mesh="dp2", minibatches=1, **TINY | {"steps": 1}
    )
    rows = run.metrics
    assert len(rows) == 1 and 0 <= rows[0]["reward/mean"] <= 2
    assert rows[0]["critic/advantages/max"] != 0 and "time_s/update_policy" in rows[0]


@pytest.mark.slow
def test_a_rank_of_its_own_computes_what_this_process_does():
    given = {"prompts": PROMPTS, "reward": len_reward, "dtype": "float64", **TINY, "steps": 1}
    runs = [funrl.train(own_algorithm(2.0), mesh=mesh, **given) for mesh in ("dp1", "dp2")]
    for metric, other in zip(runs[0].metrics, runs[1].metrics, strict=True):
        for name in ("reward/mean", "actor/pg_loss", "actor/grad_norm"):
            assert metric[name] == pytest.approx(other[name], abs=1e-9)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("mesh", "forks", "fails"),
    [
        ("dp1", True, True),
        pytest.param("dp2", True, False, marks=pytest.mark.gloo),
        pytest.param("dp2", False, False, marks=[pytest.mark.gloo, pytest.mark.slow]),
    ],
)
def test_a_closure_runs_in_workers_that_end_with_the_run(mesh, forks, fails, tmp_path, monkeypatch):
    """In this process, in forked ranks and in fresh interpreters."""
    if not forks:
        monkeypatch.setattr(launch, "can_fork", lambda: False)
    before = children()

    def reward(prompt, completion, wanted):
        (tmp_path / f"{os.getpid()}-{os.getppid()}").touch()
        return 1 / 0 if fails and int(wanted) > 4 else float(completion == wanted)

    settings = {"reward_workers": 1 + forks, "queue": "fixed", "warmstart_steps": 0, **TINY, "steps": 1}
    with pytest.raises(funrl.RunError, match="ZeroDivisionError") if fails else contextlib.nullcontext():
        funrl.train("grpo", prompts=PROMPTS, reward=reward, mesh=mesh, **settings)
    workers, servers = (
        set(pids) for pids in zip(*(path.name.split("-") for path in tmp_path.glob("[0-9]*-*")), strict=True)
    )
    assert len(servers) == int(mesh[2:]) and len(workers) <= (1 + forks) * len(servers)
    assert str(os.getpid()) not in workers | servers and children() <= before
    assert not any(os.path.exists(f"/proc/{pid}") for pid in workers | servers)


@pytest.mark.parametrize(
    "more", [{"new_tokens_per_step": 2}, pytest.param({"mesh": "dp2", "reward_workers": 0}, marks=pytest.mark.gloo)]
)
def test_other_numbers_of_a_reward_are_metrics(more):
    def first(prompt, completion, **fields):
        return {"score": len(completion) / 4, "acc": fields["wanted"] in completion, "mean": 3.0, "why": "text"}

    def second(prompt, completion, **fields):
        return {"score": 0.0, "length": len(completion)} if completion else 0.0

    run = funrl.train("grpo", prompts=PROMPTS, reward=[first, second], **TINY | {"steps": 1} | more)
    (line,) = [metric for metric in run.metrics if "reward/mean" in metric]
    assert line["reward/mean_entry"] == 3.0 and 0 <= line["reward/acc"] <= 1 and "reward/why" not in line
    if "new_tokens_per_step" not in more:  # a step may finish more prompts than it trains on
        assert line["reward/length"] >= 4 * line["reward/first/mean"]
    evaluated = [item for item in run.metrics if "eval/reward" in item][-1]
    assert 0 <= evaluated["eval/reward/acc"] <= 1


def len_reward(prompt, completion, **fields):
    return len(completion) / 4


@pytest.mark.slow
def test_several_rewards_a_model_of_a_directory_and_what_the_run_leaves(model, tmp_path):
    rewards = {"length": len_reward, "ones": lambda prompt, completion, **_: completion.count("1")}
    run = funrl.train("gdpo", model=model, prompts=PROMPTS, reward=rewards, reward_weights="1,0.5", lr=1e-2, **TINY)
    assert "reward/ones/mean" in run.metrics[0]
    assert run.run_dir.startswith("runs/gdpo")
    before, after = (hf.load(folder, torch.float32)[1] for folder in (model, run.model.directory))
    assert (before["embed"] - after["embed"]).abs().max() > 1e-3
    run.model.save(tmp_path / "copy")
    texts = ["12+30=", "1+1="]
    message = run.model.generate(texts, max_new_tokens=3)
    assert message == funrl.generate(tmp_path / "copy", texts, max_new_tokens=3)
    assert message == funrl.load(tmp_path / "copy").generate(texts, max_new_tokens=3)
    assert len(message) == 2 and all(len(text) <= 3 for text in message)


def test_greedy_completions_are_the_likeliest_tokens_and_samples_follow_their_seed(model):
    made, params = hf.load(model, torch.float32)
    tokenizer, tokens = arithmetic.tokenizer(), arithmetic.tokenizer().encode("12+30=")
    for _ in range(4):
        hidden = made.apply(params, Inputs(torch.tensor([tokens]))).hidden[0, -1]
        tokens.append(int((made.unembed(params) @ hidden).argmax()))
    wanted = tokenizer.decode(tokens, skip_special_tokens=True).removeprefix("12+30=")
    assert funrl.generate(model, ["12+30="], max_new_tokens=4) == [wanted]
    drawn = [funrl.generate(model, ["12+30="] * 8, max_new_tokens=6, temperature=1.0, seed=s) for s in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2] and len(set(drawn[0])) > 1
    assert len(funrl.generate(model, ["1+1="], max_new_tokens=2, temperature=1.0, samples=3)) == 3
    for texts, says in (("1+1=", r"write \['1\+1='\]"), (["one"], "'one': the tokenizer refuses it")):
        with pytest.raises(SettingsError, match=says):
            funrl.generate(model, texts)


def test_completions_are_drawn_as_the_models_generation_config_says(model):
    texts, file = ["12+30="] * 12, Path(model) / "generation_config.json"
    greedy = funrl.generate(model, texts, max_new_tokens=6)
    file.write_text(json.dumps({"do_sample": True, "temperature": 3.0, "top_k": 4, "eos_token_id": 5}))
    given = {"temperature": 3.0, "top_k": 4, "max_new_tokens": 6}
    message = funrl.generate(model, texts, max_new_tokens=6)
    assert len(set(greedy)) == 1 < len(set(message)) and message == funrl.generate(model, texts, **given)
    assert funrl.generate(model, texts, max_new_tokens=6, greedy=True) == greedy
    assert funrl.generate(model, texts, max_new_tokens=6, temperature=3.0) == message  # what is not given is the file's
    file.write_text(json.dumps({"do_sample": False, "temperature": 3.0, "top_k": 4}))
    assert funrl.generate(model, texts, max_new_tokens=6) == greedy
    file.write_text(json.dumps({"do_sample": True, "top_k": 1}))
    assert funrl.generate(model, texts, max_new_tokens=6) == greedy


def test_texts_in_memory_for_a_supervised_recipe():
    run = funrl.train("sft", prompts=TEXTS, steps=8, batch_prompts=8, lr=1e-2, device="cpu")
    assert "rollout/logp_mean" not in run.metrics[0] and len(run.metrics) == 8
    assert run.metrics[-1]["train/loss"] < 0.7 * run.metrics[0]["train/loss"]
    run = funrl.train("dpo", prompts=PAIRS, steps=1, batch_prompts=4, device="cpu")
    assert run.outcome.first["eval/accuracy"] == 0.5


PAIRS = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(20)]


def test_a_model_of_one_s_own_begins_at_random_weights():
    small = decoder_model(with_fields(arithmetic.model_config(), layers=1, embed=32, mlp=32))
    run = funrl.train("grpo", model=small, tokenizer=arithmetic.tokenizer(), prompts=PROMPTS, reward=len_reward, **TINY)
    assert hf.check_directory(run.model.directory).config.embed == 32


@pytest.mark.slow
def test_arguments_of_a_recipe_are_settings_too():
    weak, strong = (
        funrl.train(
            "ppo", value_clip=0.3, entropy_coef=coef, prompts=PROMPTS, reward=len_reward, seed=5, **TINY | {"steps": 1}
        )
        for coef in (0.0, 1.0)
    )
    assert weak.metrics[0]["actor/pg_loss"] != strong.metrics[0]["actor/pg_loss"]
    with open(f"{strong.run_dir}/config.json") as file:
        assert json.load(file)["flags"]["entropy_coef"] == 1.0
    with pytest.raises(SettingsError, match="clip_low='wide': a number is needed"):
        funrl.train("ppo", clip_low="wide", **TINY)


def test_what_is_given_needs_no_warm_start_and_has_none():
    """Neither prompts nor texts of one's own have demonstrations; from scratch, the embedded task has."""
    from funrl.algos import grpo, sft
    from funrl.trainer.jobs.prepare import prepare
    from funrl.trainer.settings.scorers import Given
    from funrl.trainer.settings.settings import Settings

    assert prepare(Settings(), grpo).warmstart_steps == arithmetic.WARMSTART_STEPS
    given = Given(records=PROMPTS, rewards=(len_reward,))
    assert prepare(Settings(), grpo, given).warmstart_steps == 0
    assert prepare(Settings(), sft, Given(records=TEXTS)).warmstart_steps == 0
    with pytest.raises(SettingsError, match="--warmstart_steps=7 does nothing without the embedded task"):
        prepare(settings_of(warmstart_steps=7), grpo, given)


def test_prompts_of_a_file_need_no_warm_start_on_the_command_line_either(tmp_path):
    from funrl.cli.run import main

    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in PROMPTS))
    (tmp_path / "own_reward.py").write_text("def score(prompt, completion, **fields):\n    return len(completion)\n")
    flags = ["--prompts=prompts.jsonl", "--reward=own_reward.py:score", "--run_dir=run"]
    assert main("grpo", ["grpo", *flags, *(f"--{name}={value}" for name, value in TINY.items())]) == 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"recipe": "grpo", "step": 3}, r"step=3: there is no such setting; did you mean steps\?"),
        ({"recipe": "grpo", "model": 3}, "model=3: a directory, a name, or a Model is needed"),
        ({"recipe": "grpo", "prompts": 3}, "prompts=3: a file, or a list of dicts is needed"),
        ({"recipe": "grpo", "prompts": PROMPTS, "reward": 3}, "reward=3: functions are needed"),
        ({"recipe": own_algorithm(1.0), "clip_low": 0.1}, "clip_low=0.1: there is no such setting"),
        ({"recipe": "grppo"}, "did you mean grpo"),
        (
            {"recipe": "grpo", "model": "nowhere/nothing"},
            "is not a directory, nor the name of a model in the local Hugging Face cache",
        ),
        ({"recipe": "grpo", "reward": len_reward}, "reward=... needs --prompts=FILE.jsonl"),
        ({"recipe": "grpo", "prompts": PROMPTS}, "prompts=... needs --reward"),
        ({"recipe": "grpo", "prompts": PROMPTS, "reward": lambda prompt: 0.0}, "the prompts' fields make the call"),
        ({"recipe": "sft", "prompts": PROMPTS}, "there is no field 'completion'"),
        ({"recipe": "grpo", "steps": 0}, "--steps=0: it must be at least 1"),
        ({"recipe": "grpo", "steps": 1.0}, "--steps=1.0: a whole number is needed"),
        ({"recipe": "grpo", "save_every": -1}, "--save_every=-1: it must be a number of steps, or a time such as 90s"),
        ({"recipe": "grpo", "compile": True}, "--compile=true: it must be one of on, off, auto"),
        ({"recipe": "grpo", "mesh": {"dp": 2}}, "mesh={'dp': 2}: a mesh is text; write mesh='dp2'"),
        ({"recipe": "grpo", "mesh": {"dp": 2, "tp": 4}}, "write mesh='dp2,tp4'"),
        ({"recipe": "grpo", "mesh": 2}, "mesh=2: a mesh is text; write mesh='dp2'"),
        ({"recipe": None}, "recipe=None: a recipe's name such as 'grpo', .*or an Algorithm is needed"),
        ({"recipe": print}, "recipe=print: .*call the recipe to get an Algorithm"),
        ({"recipe": "grpo", "on_step": 5}, r"on_step=5: a function of \(step, metrics\) is needed"),
        ({"recipe": "grpo", "on_step": lambda: 0}, r"on_step=<lambda>: a function of \(step, metrics\).*it takes \(\)"),
        ({"recipe": "grpo", "source": 5}, r"source=5: a function of \(job, parts, frozen, clock, observer\) is needed"),
        ({"recipe": "grpo", "curriculum": 5}, "curriculum=5: a function, or 'FILE.py:function' is needed"),
        ({"recipe": own_algorithm(1.0), "clip_low": 0.1}, "it is an argument of .*, and this algorithm has none"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(settings, says, tmp_path):
    with pytest.raises((SettingsError, LoadError, ValueError), match=says):
        funrl.train(**settings)
    assert not list(tmp_path.iterdir())


def test_numbers_of_numpy_are_taken_and_a_run_is_a_line(tmp_path):
    numbers = {"steps": np.int64(1), "lr": np.float32(1e-3), "kl_coef": np.float64(0.0), "per_sequence": np.bool_(True)}
    run = funrl.train(
        "grpo", **TINY | numbers, save_every=0, warmstart_steps=0, run_dir=tmp_path / "run", on_step=print
    )
    flags = json.loads((tmp_path / "run" / "config.json").read_text())["flags"]
    assert (flags["steps"], flags["save_every"], flags["per_sequence"]) == (1, "0", True)
    assert re.fullmatch(r"<Run \S*/run: 1 steps, eval/reward \S+ -> \S+, eval/accuracy \S+ -> \S+>", repr(run))
    assert repr(funrl.TrainedModel(tmp_path)) == f"<TrainedModel {tmp_path}>"
    evaluation = funrl.evaluate(
        tmp_path / "run", limit=np.int64(2), samples=np.int8(2), temperature=1, output=tmp_path / "out"
    )
    assert repr(evaluation).startswith("2 prompts, 2 completions of each\n") and "\naccuracy (mean@2)" in str(
        evaluation
    )


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m: funrl.generate(None, ["1+1="]), "model=None: a directory is needed, or the name"),
        (lambda m: funrl.evaluate(3), "model=3: a directory is needed"),
        (
            lambda m: funrl.evaluate(funrl.TrainedModel("m")),
            "model=<TrainedModel m>.*a directory is needed, here 'm'",
        ),
        (lambda m: funrl.load(None), "directory=None: a directory is needed"),
        (
            lambda m: funrl.generate(m, ["1+1="], max_new_token=3),
            r"max_new_token=3: .*; did you mean max_new_tokens\?",
        ),
        (lambda m: funrl.generate(m, ["1+1="], mesh={"dp": 2}), "write mesh='dp2'"),
        (lambda m: funrl.evaluate(m, smaples=3), r"smaples=3: there is no such setting; did you mean samples\?"),
        (lambda m: funrl.evaluate(m, max_completion_length=3), "is TRL's name: write max_new_tokens=3"),
        (
            lambda m: funrl.evaluate(m, run_name="x"),
            "run_name=x: there is no such setting; `funrl eval",
        ),
        (lambda m: funrl.evaluate(m, mesh={"dp": 2}), "write mesh='dp2'"),
        (lambda m: funrl.evaluate(m, limit=-1), "limit=-1: it must be at least 1"),
        (lambda m: funrl.evaluate(m, step="last"), "step='last': a whole number is needed"),
        (lambda m: funrl.generate(m, ["1+1="], seed="x"), "seed='x': a whole number is needed"),
        (lambda m: funrl.train("grpo", model=m, tokenizer=3), "tokenizer=3 does nothing without a Model"),
    ],
)
def test_other_functions_refuse_what_cannot_work_too(call, says, model):
    with pytest.raises(SettingsError, match=says):
        call(model)


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match="empty"):
        (tmp_path / "empty").mkdir()
        funrl.load(tmp_path / "empty")


def test_the_public_index_is_whole_and_lazy():
    assert all(getattr(funrl, name) is not None for name in funrl.__all__)
    with pytest.raises(AttributeError, match="funrl has no 'trian'; it has"):
        _ = funrl.trian


@pytest.mark.slow
@pytest.mark.gloo
def test_a_reward_that_takes_long_is_told_after_a_heartbeat(tmp_path, monkeypatch, capfd):
    """One prompt's, so that one rank waits for the other: until its signal, two minutes at most."""
    line = re.compile(
        r"^no progress for \d+ s: the run waits for rank \d on \S+ \(step 1, reward.*\).*"
        r"; the run ends when a rank has waited 60 minutes \(--timeout\)$",
        re.MULTILINE,
    )
    message, say = tmp_path / "said", stall_monitor.say
    message.touch()

    def also_written(text):
        say(text)
        with message.open("a") as out:
            out.write(f"{text}\n")

    monkeypatch.setattr(stall_monitor, "say", also_written)

    def slow(prompt, completion, wanted):
        end = time.monotonic() + 120
        while prompt == PROMPTS[2]["prompt"] and not line.search(message.read_text()) and time.monotonic() < end:
            time.sleep(0.02)
        return float(completion[:1] == wanted)

    few = {**TINY, "batch_prompts": 18, "steps": 1, "samples_per_prompt": 1, "dtype": "float64"}  # 2 are held out
    funrl.train("rloo", prompts=PROMPTS, reward=slow, reward_workers=0, mesh="dp2", heartbeat=1, **few)
    assert line.search(capfd.readouterr().err)
