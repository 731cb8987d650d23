"""A start that makes no step leaves nothing behind, or can be begun anew in the same directory."""

import json
from pathlib import Path

import pytest

import funrl
from funrl.cli.run import main
from funrl.trainer.checkpoints.checkpoint import complete_checkpoints

TINY = (
    "--device=cpu",
    "--compile=off",
    "--batch_prompts=4",
    "--eval_prompts=2",
    "--warmstart_steps=0",
    "--steps=2",
    "--samples_per_prompt=2",
    "--max_new_tokens=4",
    "--save_every=1",
    "--reward_workers=0",
)
REWARD = """
import os

calls = 0


def at_once(prompt, completion):
    return {}["gone"]


def in_the_second_step(prompt, completion):
    global calls
    calls += 1
    return 0.5 if calls <= 2 + 8 else {}["gone"]


def fine(prompt, completion):
    return 0.5
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text("".join(f'{{"prompt": "{i}+{i}="}}\n' for i in range(1, 9)))
    Path("r.py").write_text(REWARD)
    return tmp_path


def call(reward, *flags):
    return main("grpo", ["grpo", *TINY, "--prompts=p.jsonl", f"--reward=r.py:{reward}", *flags])


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [("--run_dir=RUN",), pytest.param(("--run_dir=RUN", "--resume"), marks=pytest.mark.slow), ()],
    ids=["named", "resumed", "new"],
)
def test_an_error_before_the_first_step_leaves_no_directory(flags, own, capsys):
    assert call("at_once", *flags) == 1
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and "'gone'" in err and "results in" not in out and "was saved" not in out
    assert not (own / "RUN").exists() and not list(own.glob("runs/*"))
    assert call("fine", "--run_dir=RUN") == 0


def test_other_files_of_the_directory_stay(own):
    (own / "RUN").mkdir()
    (own / "RUN" / "job.log").write_text("mine")
    assert call("at_once", "--run_dir=RUN") == 1
    assert [path.name for path in (own / "RUN").iterdir()] == ["job.log"]


def test_an_error_after_a_step_keeps_what_was_made(own, capsys):
    assert call("in_the_second_step", "--run_dir=RUN") == 1
    assert "results in RUN" in capsys.readouterr().out
    assert complete_checkpoints("RUN/checkpoints").keys() == {1} and (own / "RUN/model").is_dir()
    assert call("fine", "--run_dir=RUN", "--overwrite") == 2
    err = capsys.readouterr().err
    assert "--overwrite removes only what a start has left that made no step; give another directory" in err
    assert complete_checkpoints("RUN/checkpoints").keys() == {1}


@pytest.mark.slow
def test_a_start_that_was_killed_is_overwritten_only_where_that_is_asked_for(own, capsys):
    run = own / "RUN"
    (run / "checkpoints" / ".step-0.1").mkdir(parents=True)
    (run / "tensorboard").mkdir()
    for name in ("metrics.jsonl", "samples.jsonl"):
        (run / name).touch()
    (run / "config.json").write_text(json.dumps({"experiment": "grpo", "flags": {}}))
    assert call("fine", "--run_dir=RUN") == 2
    assert "no step is among them: --overwrite begins anew there, or give another directory" in capsys.readouterr().err
    assert call("fine", "--run_dir=RUN", "--overwrite", "--resume") == 2
    assert "--overwrite starts over and --resume continues; leave one of them out" in capsys.readouterr().err
    assert call("fine", "--run_dir=RUN", "--overwrite") == 0
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert len(json.loads((run / "config.json").read_text())["segments"]) == 1


def test_a_resume_does_not_take_a_models_directory_for_its_own(own, capsys):
    (own / "MODEL").mkdir()
    (own / "MODEL" / "config.json").write_text('{"model_type": "llama"}')
    assert call("fine", "--run_dir=MODEL", "--resume") == 2
    assert "holds a config.json that no run has written (a model?)" in capsys.readouterr().err
    assert (own / "MODEL" / "config.json").read_text() == '{"model_type": "llama"}'


def test_so_it_is_in_python(own):
    def fails(prompt, completion):
        raise KeyError("gone")

    small = {"batch_prompts": 4, "samples_per_prompt": 2, "max_new_tokens": 4, "eval_prompts": 2, "steps": 1}
    records = [{"prompt": f"{i}+{i}="} for i in range(1, 9)]
    try:
        run = funrl.train("grpo", prompts=records, reward=fails, device="cpu", run_dir="RUN", reward_workers=0, **small)
        assert run.outcome.error is not None
    except Exception as error:
        assert "gone" in str(error)
    assert not (own / "RUN").exists()
