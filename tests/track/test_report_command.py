"""`funrl report`, and the last line of a run."""

import json
import os
from types import SimpleNamespace

from funrl.cli import main as cli
from funrl.track.observe import RunObserver
from funrl.track.records.run_directory import open_run
from funrl.track.records.samples import Sample, open_samples
from funrl.track.records.trackers import jsonl
from funrl.trainer.settings.settings import settings_of
from funrl.trainer.sources.evaluation import EvalRow


def a_run(path, reward, lr, supervised=False):
    run = open_run(path, "grpo", {"mesh": "dp1", "seed": 3, "task": "sums", "steps": 4, "lr": lr, "run_dir": str(path)})
    tracker, samples = jsonl(run.metrics), open_samples(run.samples)
    for step in range(1, 5):
        row = {"train/loss": 1 / step} if supervised else {"reward/mean": reward * step, "actor/ppo_kl": 1e-3}
        tracker.write(step, row | {"eval/loss" if supervised else "eval/reward": reward, "time_s/step": 1.0})
        samples.write(Sample(step, "1<2 & 3", f"answer {step} of {reward}", reward))
    tracker.close()
    samples.close()
    return str(path)


def test_tables_of_evaluations_read_as_people_write(tmp_path):
    task = SimpleNamespace(name="sums", readable=lambda text: text[::-1])
    settings = settings_of(steps=1)
    folder = open_run(tmp_path / "run", "grpo", {}).path
    with RunObserver(SimpleNamespace(task=task, settings=settings), str(folder), 0) as observer:
        observer.evaluated([EvalRow(1, "line 1", 0, "745+58=", "308", "308", 1.0, True, 3, True, {})])
    row = json.loads((folder / "eval_samples.jsonl").read_text())
    assert (row["completion"], row["answer"]) == ("803", "803")


def test_a_report_is_written_again(tmp_path, capsys):
    run = a_run(tmp_path / "a", 0.1, 1e-3)
    assert cli.main(["funrl", "report", run]) == 0
    assert capsys.readouterr().out == f"open {run}{os.sep}report.html\n" and (tmp_path / "a/report.html").exists()
    config = json.loads((tmp_path / "a/config.json").read_text())
    assert config["experiment"] == "grpo"
    assert cli.main(["funrl", "report", "--steps=3"]) == 2
    assert "usage: funrl report RUN" in capsys.readouterr().err


def test_the_last_line_says_what_was_evaluated_once():
    from funrl.cli.run import _held_out
    from funrl.trainer.loop import Outcome

    first, last = {"eval/reward": 0.25, "eval/examples": 3.0}, {"eval/reward": 0.5, "eval/examples": 3.0}
    assert _held_out(Outcome(first, last, None)) == ["held out (n = 3): eval/reward 0.250 -> 0.500"]
    assert _held_out(Outcome(first, {}, None)) == ["held out (n = 3, evaluated once): eval/reward 0.250"]
    unchanged = ["held out (n = 3): eval/reward 0.250 -> 0.250"]  # evaluated twice
    assert _held_out(Outcome(first, dict(first), None)) == unchanged
    assert _held_out(Outcome({}, {}, "failed")) == _held_out(None) == []
