"""A run that stops and continues leaves what one that never stopped leaves: every line, every weight, every sample."""

import json
import os
import signal
import time

import pytest
from forked_python import start_python

from funrl.cli import main as cli
from funrl.cli.run import main
from funrl.track.records.run_directory import RunDirectoryError
from funrl.track.records.run_lock import owned_run

TINY = (
    "--device=cpu",
    "--compile=off",
    "--batch_prompts=4",
    "--eval_prompts=4",
    "--eval_every=1",
    "--warmstart_steps=1",
)
RL = ("--samples_per_prompt=2", "--max_new_tokens=4", "--sample_every=1")


def run(name, folder, *flags, save_every=1):
    return main(name, [name, *TINY, f"--save_every={save_every}", f"--run_dir={folder}", *flags])


def lines(folder, name="metrics.jsonl"):
    """The lines without times and memory."""
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    measured = ("time_s/", "memory/", "perf/tokens_per_s")
    return [{key: value for key, value in row.items() if not key.startswith(measured)} for row in rows]


def model(folder):
    return {file.name: file.read_bytes() for file in (folder / "model").glob("*.safetensors")}


LORA = ("--lora_rank=2", "--lora_alpha=3", "--lora_targets=q_proj,down_proj")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lora"),
    [("grpo", ()), pytest.param("reward_model", LORA, marks=pytest.mark.slow)],
    ids=["grpo", "reward_model with adapters"],
)
def test_every_kind_of_run_goes_on_with_the_same_bits(name, lora, tmp_path, capsys):
    more = (RL if name == "grpo" else ()) + lora
    assert run(name, tmp_path / "whole", "--steps=2", *more) == 0
    assert run(name, tmp_path / "run", "--steps=1", "--resume", *more) == 0
    assert "there is no checkpoint in" in capsys.readouterr().out
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:  # of a step that no checkpoint holds
        file.write('{"step": 2, "reward/mean": 17}\n')
    assert run(name, tmp_path / "run", "--steps=2", "--resume", *more) == 0
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    assert model(tmp_path / "run") == model(tmp_path / "whole") != {}
    assert cli.main(["funrl", "export", str(tmp_path / "run"), f"--to={tmp_path / 'exported'}"]) == 0
    exported = {file.name: file.read_bytes() for file in (tmp_path / "exported").iterdir()}
    assert exported == {file.name: file.read_bytes() for file in (tmp_path / "run" / "model").iterdir()}
    status = cli.main(["funrl", "export", str(tmp_path / "run"), f"--to={tmp_path / 'peft'}", "--adapter"])
    if lora:
        peft = {file.name: file.read_bytes() for file in (tmp_path / "peft").iterdir()}
        assert status == 0 and peft == {f.name: f.read_bytes() for f in (tmp_path / "run" / "adapter").iterdir()}
    else:
        assert status == 2 and "step-2 holds all weights and no adapters; leave it out" in capsys.readouterr().err
    if name == "grpo":
        assert run(name, tmp_path / "run", "--steps=2", "--resume", *more) == 0
        assert "; --steps=2: nothing is left to do" in capsys.readouterr().out
        assert lines(tmp_path / "run", "samples.jsonl")[-8:] == lines(tmp_path / "whole", "samples.jsonl")[-8:]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("RUN", "--step=3"), "--step=3: RUN has checkpoints of steps 1"),
        (("EMPTY",), "EMPTY has no checkpoint"),
        (("ENDED",), "ENDED has no checkpoint; --save_every makes some; the model at its end is ENDED/model"),
        ((), "usage: funrl export RUN_DIR"),
        (("RUN", "--stpe=3"), "--stpe is not a flag; did you mean --step? usage: funrl export RUN_DIR"),
        (("RUN", "--step=-1"), "--step=-1: it must be at least 0"),
    ],
)
def test_what_cannot_be_exported(argv, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "RUN/checkpoints/step-1").mkdir(parents=True)
    (tmp_path / "RUN/checkpoints/step-1/complete.json").write_text("{}")
    (tmp_path / "ENDED/model").mkdir(parents=True)
    (tmp_path / "ENDED/model/config.json").write_text("{}")
    assert cli.main(["funrl", "export", *argv]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def started(folder, *flags):
    words = ["-m", "funrl.experiments.grpo", *TINY, *RL, f"--run_dir={folder}", *flags]
    run = start_python(words, os.environ | {"OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 300
    while not (folder / "metrics.jsonl").exists() or len((folder / "metrics.jsonl").read_bytes().splitlines()) < 1:
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()
        time.sleep(0.02)
    return run


@pytest.mark.gloo
@pytest.mark.slow
def test_sigterm_saves_the_state_and_the_run_goes_on_from_there(tmp_path):
    folder, flags = tmp_path / "run", ("--mesh=dp2", "--queue=fixed")
    first = started(folder, "--steps=100000", "--save_every=0", *flags)
    with pytest.raises(RunDirectoryError, match=rf"another run writes there \(process {first.pid} on "):
        owned_run(folder, "grpo", {}, resume=False).__enter__()
    first.send_signal(signal.SIGTERM)
    _, err = first.communicate(timeout=120)
    assert first.returncode == 143
    stopped = lines(folder)[-1]["step"]
    message = f"terminated after step {stopped}, which is saved; --resume --run_dir={folder} continues"
    assert err.strip().splitlines()[-1] == message
    steps = f"--steps={stopped + 1}"
    assert run("grpo", folder, *RL, *flags, steps, "--resume", save_every=0) == 0
    assert run("grpo", tmp_path / "whole", *RL, *flags, steps, save_every=0) == 0
    assert lines(folder) == lines(tmp_path / "whole")
    assert model(folder) == model(tmp_path / "whole") != {}
