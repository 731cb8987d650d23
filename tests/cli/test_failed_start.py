"""A start that makes no step leaves nothing behind."""

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
    assert call("fine", "--run_dir=RUN") == 2
    assert "as a former run leaves them; give another directory or remove them" in capsys.readouterr().err
    assert call("fine", "--run_dir=NEW", "--overwrite") == 2
    assert "remove what a start without a step has left" in capsys.readouterr().err
    assert complete_checkpoints("RUN/checkpoints").keys() == {1}


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
