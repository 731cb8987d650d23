"""`funrl compare` and `funrl report`: pages about runs that are there."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from written_runs import checked

from funrl.cli import main as cli
from funrl.data.processors.thumbnails import ShownPicture
from funrl.track.observe import RunObserver
from funrl.track.records.run_directory import RunDirectory, open_run
from funrl.track.records.samples import Sample, open_samples
from funrl.track.records.trackers import jsonl
from funrl.track.report.compare import _names, write_comparison
from funrl.track.report.run_files import ReportError
from funrl.trainer.settings.settings import settings_of
from funrl.trainer.sources.evaluation import EvalRow


def a_run(path, reward, lr, supervised=False):
    run = open_run(path, "grpo", {"mesh": "dp1", "seed": 3, "task": "sums", "steps": 4, "lr": lr, "run_dir": str(path)})
    tracker, samples = jsonl(run.metrics), open_samples(run.samples)
    for step in range(1, 5):
        row = {"train/loss": 1 / step} if supervised else {"reward/mean": reward * step, "actor/ppo_kl": 1e-3}
        tracker(step, row | {"eval/loss" if supervised else "eval/reward": reward, "time_s/step": 1.0})
        samples.write(Sample(step, "1<2 & 3", f"answer {step} of {reward}", reward))
    tracker.close()
    samples.close()
    return str(path)


def test_runs_are_compared_on_one_page(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [
        a_run(tmp_path / "a/run", 0.1, 1e-3),
        a_run(tmp_path / "b/run", 0.2, 1e-4),
        a_run(tmp_path / "c", 0.3, 1e-4, True),
    ]
    assert cli.main(["funrl", "compare", *runs]) == 0 and capsys.readouterr().out == "open compare.html\n"
    page = (tmp_path / "compare.html").read_text()
    example = checked(page)
    assert "3 runs" in example.text
    for text in (
        "a/run",
        "b/run",
        "Reward, sampled",
        "Reward, held out",
        "Loss, batch",
        "0.001",
        "0.0001",
        "answer 4 of 0.1",
        "answer 4 of 0.2",
        "1<2 & 3",
    ):
        assert text in example.text, text
    table = page.split("What differs in the configuration")[1].split("</table>")[0]
    assert ">lr<" in table and ">seed<" not in table and ">run_dir<" not in table
    labels = [attributes["aria-label"] for tag, attributes in example.tags if tag == "svg"]
    assert any(x.startswith("Reward, sampled: a/run 0.1 to 0.4, b/run 0.2 to 0.8") for x in labels)


def test_a_metric_has_one_chart_and_every_run_its_last_value(tmp_path):
    runs = [a_run(tmp_path / "a", 0.1, 1e-3), a_run(tmp_path / "b", 0.2, 1e-4)]
    for run, accuracy in zip(runs, (0.25, 0.75), strict=True):
        with open(f"{run}/metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": 5, "eval/accuracy": accuracy}) + "\n")
    page = write_comparison(runs, tmp_path / "c.html").read_text()
    assert page.count(">Accuracy</b>") == 1 and "Pair accuracy" not in page
    legend = page.split(">Accuracy</b>")[1].split("</figcaption>")[0]
    assert "a<b>0.25</b>" in legend and "b<b>0.75</b>" in legend


def test_episodes_are_compared_with_their_figures(tmp_path):
    runs = [a_run(tmp_path / "a", 0.1, 1e-3), a_run(tmp_path / "b", 0.2, 1e-4)]
    for run, name in zip(runs, "ab", strict=True):
        says = [{"role": "user", "text": "2*3"}, {"role": "assistant", "text": f"six by {name}", "sampled": True}]
        conversation = {"branches": [{"agent": "policy", "reward": None, "says": says}], "status": "turns"}
        samples = open_samples(RunDirectory(Path(run)).samples)
        samples.write(Sample(5, "2*3", "six", None, conversation=conversation))
        samples.close()
        forks = {"episodes/forks/thinking": 0.5} if name == "a" else {}
        row = {
            "step": 5,
            "episodes/turns": 2.0,
            "episodes/tool_calls": 1.0,
            "source/math/reward": 0.25,
            "reward/form": 1.0,
        }
        with open(f"{run}/metrics.jsonl", "a") as file:
            file.write(json.dumps(row | forks) + "\n")
    text = " ".join(checked(write_comparison(runs, tmp_path / "c.html").read_text()).text.split())
    for part in (
        "six by a",
        "six by b",
        "ended by its limit of turns",
        "step 5 unscored",
        "Calls of tools, calls",
        "Forks by cause",
        "Reward by source",
        "Parts of rewards",
        "Turns, sampled",
    ):
        assert part in text, part


def test_tables_of_evaluations_read_as_people_write(tmp_path):
    task = SimpleNamespace(name="sums", readable=lambda text: text[::-1])
    settings = settings_of(steps=1)
    folder = open_run(tmp_path / "run", "grpo", {}).path
    with RunObserver(SimpleNamespace(task=task, settings=settings), str(folder), 0) as observer:
        observer.evaluated([EvalRow(1, "line 1", 0, "745+58=", "308", "308", 1.0, True, 3, True, {})])
    row = json.loads((folder / "eval_samples.jsonl").read_text())
    assert (row["completion"], row["answer"]) == ("803", "803")


def test_what_cannot_be_compared_is_said(tmp_path, capsys):
    first = a_run(tmp_path / "a", 0.1, 1e-3)
    for argv, says in (
        (["compare", first], "1 runs: two to 8 can be compared"),
        (["compare", first, first], "a: is given twice"),
        (["compare", first, str(tmp_path / "none")], "none: no such directory"),
        (["compare"], "usage: funrl compare RUN RUN"),
        (["report", "--steps=3"], "usage: funrl report RUN"),
    ):
        assert cli.main(["funrl", *argv]) == 2
        assert says in capsys.readouterr().err
    assert _names(["x/a/r", "x/b/r"]) == ["a/r", "b/r"]


def test_a_report_is_written_again(tmp_path, capsys):
    run = a_run(tmp_path / "a", 0.1, 1e-3)
    assert cli.main(["funrl", "report", run]) == 0
    assert capsys.readouterr().out == f"open {run}{os.sep}report.html\n" and (tmp_path / "a/report.html").exists()
    config = json.loads((tmp_path / "a/config.json").read_text())
    assert config["experiment"] == "grpo"
    with pytest.raises(ReportError, match="is given twice"):
        _names(["a", "./a"])


def test_the_latest_samples_come_first(tmp_path):
    runs = [a_run(tmp_path / name, 0.1, 1e-3) for name in ("a", "b")]
    for run in runs:
        path = RunDirectory(Path(run)).samples
        later = path.read_text()
        path.write_text("")
        samples = open_samples(path)
        for number in range(8):
            samples.write(Sample(0, f"first prompt {number}", "early", 0.0))
        samples.close()
        path.write_text(path.read_text() + later)
    page = write_comparison(runs, tmp_path / "c.html").read_text()
    assert 0 < page.index("answer 4 of 0.1") < page.index("first prompt 0") and "first prompt 7" not in page


def test_the_last_line_says_what_was_evaluated_once():
    from funrl.cli.run import _held_out
    from funrl.trainer.loop import Outcome

    first, last = {"eval/reward": 0.25, "eval/examples": 3.0}, {"eval/reward": 0.5, "eval/examples": 3.0}
    assert _held_out(Outcome(first, last, None)) == ["held out (n = 3): eval/reward 0.250 -> 0.500"]
    assert _held_out(Outcome(first, {}, None)) == ["held out (n = 3, evaluated once): eval/reward 0.250"]
    unchanged = ["held out (n = 3): eval/reward 0.250 -> 0.250"]  # evaluated twice
    assert _held_out(Outcome(first, dict(first), None)) == unchanged
    assert _held_out(Outcome({}, {}, "failed")) == _held_out(None) == []


def test_the_same_words_about_two_pictures_are_compared_apart(tmp_path):
    runs = [a_run(tmp_path / "a", 0.1, 1e-3), a_run(tmp_path / "b", 0.2, 1e-4)]
    for run in runs:
        samples = open_samples(Path(run) / "samples.jsonl")
        for number in range(2):
            shown = ShownPicture("", "8x8", f"digest{number}", "data:image/png;base64,AAAA")
            samples.write(Sample(5, "how many?", f"of {number}", 1.0, pictures=(shown,)))
        samples.close()
    page = write_comparison(runs, tmp_path / "c.html").read_text()
    assert [page.count(f'title="8x8 digest{number}"') for number in range(2)] == [2, 2]
