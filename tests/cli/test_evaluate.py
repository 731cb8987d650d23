"""`funrl evaluate` and `funrl generate`, and the functions behind them: of a directory, a run or its checkpoint."""

import json
from pathlib import Path

import pytest
import torch

import funrl
from funrl.cli import main as cli
from funrl.cli.evaluate import settings_of_stored
from funrl.models import decoder_model
from funrl.models.huggingface import directories as hf
from funrl.tasks import arithmetic
from funrl.trainer.checkpoints.stored_models import StoredModel
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.scorers import Given

TINY = {"steps": 2, "batch_prompts": 4, "samples_per_prompt": 2, "eval_prompts": 8, "device": "cpu", "lr": 1e-2}
REWARD = "def score(prompt, completion, *, answer, **fields):\n    return float(completion[:1] in answer)\n"


def call(capsys, *argv):
    status = cli.main(["funrl", *map(str, argv)])
    return status, *capsys.readouterr()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a run on the embedded task, one on a file, a model's directory, prompts and a reward."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        made = decoder_model(arithmetic.model_config())
        hf.save(folder / "plain", made, made.init(torch.Generator().manual_seed(3)), arithmetic.tokenizer())
        rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)[::-1]} for n in range(20)]
        (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "r.py").write_text(REWARD)
        funrl.train("grpo", run_dir="embedded", save_every="1", warmstart_steps=2, **TINY)
        own = {"model": "plain", "prompts": "p.jsonl", "reward": "r.py:score", "max_new_tokens": 3}
        sampled = {"eval_samples": 2, "eval_temperature": 1.0, "seed": 5}
        funrl.train("grpo", run_dir="own", save_every="1", **own, **sampled, **TINY)
    return folder


@pytest.fixture(autouse=True)
def there(home, monkeypatch):
    monkeypatch.chdir(home)


def last_evaluation(run):
    row = json.loads(Path(run, "metrics.jsonl").read_text().splitlines()[-1])
    return {key: value for key, value in row.items() if key.startswith("eval/")}


@pytest.mark.slow
@pytest.mark.parametrize("run", [pytest.param("embedded", marks=pytest.mark.slow), "own"])
def test_the_evaluation_of_a_run_is_the_one_that_it_made(run, tmp_path):
    evaluation = funrl.evaluate(run, output=tmp_path / "a", device="cpu")
    assert evaluation.metrics == last_evaluation(run)
    record = json.loads((tmp_path / "a" / "evaluation.json").read_text())
    assert record["metrics"] == evaluation.metrics and record["prompts"] == evaluation.prompts == (
        8 if run == "embedded" else 2
    )
    assert len(evaluation.rows) == evaluation.prompts * evaluation.samples and evaluation.samples == (
        1 if run == "embedded" else 2
    )
    assert (
        funrl.evaluate(f"{run}/checkpoints/step-2", output=tmp_path / "b", device="cpu").metrics == evaluation.metrics
    )  # the checkpoint
    if run == "own":  # other weights, other noise and data of its own
        assert funrl.evaluate(run, step=1, output=tmp_path / "c", device="cpu").rows != evaluation.rows
        other = funrl.evaluate(run, seed=1, data="p.jsonl", limit=10, output=tmp_path / "d", device="cpu")
        assert other.prompts == 10 and {row["source"].split(",")[0] for row in other.rows} == {"p.jsonl"}


@pytest.mark.slow
@pytest.mark.gloo
def test_the_command_prints_a_table_and_a_mesh_changes_no_number(capsys, tmp_path):
    flags = ["--data=p.jsonl", "--reward=r.py:score", "--samples=4", "--temperature=1", "--max_new_tokens=2"]
    results = []
    for number, (model, mesh) in enumerate((("own", "dp1"), ("own/model", "dp2"))):
        step = ["--step=2"] * (model == "own")
        status, out, _ = call(
            capsys, "evaluate", model, *flags, *step, f"--mesh={mesh}", f"--output={tmp_path / str(number)}"
        )
        assert status == 0 and "20 prompts, 4 completions of each" in out and "accuracy (mean@4)" in out
        assert "pass@4" in out and "maj@4" in out and "95% interval" in out
        record = json.loads((tmp_path / str(number) / "evaluation.json").read_text())
        results.append((record["metrics"], (tmp_path / str(number) / "eval_samples.jsonl").read_text()))
    assert results[0] == results[1]


def test_from_python_with_prompts_and_rewards_in_memory(tmp_path):
    def reward(prompt, completion, wanted):
        return len(completion) / 3

    data = [{"prompt": "1+1=", "wanted": "2"}, {"prompt": "3+4=", "wanted": "7"}]
    how = {"samples": 3, "temperature": 1.0, "max_new_tokens": 3, "device": "cpu"}
    evaluation = funrl.evaluate("plain", data=data, reward=reward, output=tmp_path / "x", **how)
    assert evaluation.metrics["eval/best@3"] >= evaluation.metrics["eval/reward"] and str(evaluation).startswith(
        "2 prompts, 3 compl"
    )
    assert [row["prompt"] for row in evaluation.rows] == ["1+1="] * 3 + ["3+4="] * 3


@pytest.mark.slow
@pytest.mark.gloo
def test_completions_are_printed_or_written(capsys, tmp_path):
    status, out, _ = call(capsys, "generate", "plain", "12+30=", "--max_new_tokens=4", "--device=cpu")
    assert (status, out) == (0, funrl.generate("plain", ["12+30="], max_new_tokens=4)[0] + "\n")
    assert call(capsys, "generate", "plain", "--max_new_tokens=4", "--device=cpu", "--", "12+30=")[:2] == (0, out)
    sampled = ["--samples=2", "--temperature=1", "--max_new_tokens=3", "--device=cpu"]
    for mesh in ("dp1", "dp2"):
        assert (
            call(
                capsys,
                "generate",
                "own",
                "--prompts=p.jsonl",
                *sampled,
                f"--mesh={mesh}",
                f"--output={tmp_path / mesh}",
                "--limit=3",
            )[0]
            == 0
        )
    written = (tmp_path / "dp1").read_text()
    rows = [json.loads(line) for line in written.splitlines()]
    assert written == (tmp_path / "dp2").read_text() and len(rows) == 6
    assert set(rows[0]) == {"prompt", "answer", "sample", "completion", "tokens", "finished"}
    assert all(row["answer"] == str(2 * int(row["prompt"].split("+")[0]))[::-1] for row in rows)
    status, out, _ = call(capsys, "generate", "plain", "1+1=", "2+2=", "--max_new_tokens=3", "--device=cpu")
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["1+1=", "2+2="]
    texts = ["1+1=", "2+2="]
    alone = funrl.generate("own", texts, max_new_tokens=3, temperature=1.0, samples=2)
    assert alone == funrl.generate("own", texts, max_new_tokens=3, temperature=1.0, samples=2, mesh="dp2")
    assert len(alone) == 4 and funrl.generate("own", []) == []


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["evaluate"], "usage: funrl evaluate MODEL"),
        (["evaluate", "nowhere/nothing"], "nowhere/nothing: no such directory, and no such model in the local cache"),
        (["evaluate", "plain"], "--data=FILE is needed: the prompts"),
        (["evaluate", "plain", "--data=p.jsonl"], "an evaluation needs a --reward=FILE.py:function or --reward_model"),
        (["evaluate", "plain", "--data=gone.jsonl", "--reward=r.py:score"], "--data: gone.jsonl: no such file"),
        (["evaluate", "plain", "--step=3"], "--step=3: plain is not the directory of a run"),
        (["evaluate", "own", "--step=7"], "--step=7: own has checkpoints of steps 1, 2"),
        (["evaluate", "own", "more"], "'more' is not a flag"),
        (["evaluate", "own", "--smaples=3"], "did you mean --samples?"),
        (
            ["evaluate", "embedded", "--samples=3"],
            "--samples=3 does nothing without evaluation by samples (--temp",
        ),
        (["evaluate", "own", "--mesh=dp0"], "must be at least 1"),
        (["evaluate", "own", "--output=own"], "--output=own: holds metrics.jsonl"),
        (["evaluate", "own", "--steps=3"], "--steps is not a flag"),
        (["generate", "own"], "give prompts, or --prompts=FILE"),
        (["generate", "own", "x", "--prompts=p.jsonl"], "give prompts, or --prompts=FILE"),
        (["generate", "own", "1+1=", "--max_new_tokens=100"], "leaves none for a prompt"),
        (["generate", "own", "1+1=", "--output=gone/x.jsonl"], "--output=gone/x.jsonl: cannot be written: No such"),
        (["generate", "own", "--prompts=r.py"], "error: --prompts: r.py, line 1: not valid JSON"),
        (
            ["evaluate", "own", "--device=xla"],
            "error: --device=xla: it must be one of cpu, cuda",
        ),
        (["generate", "own", "--prompts=p.jsonl", "--output=./p.jsonl"], "is the file of the prompts"),
    ],
)
def test_what_cannot_work_is_said_in_a_line(argv, says, capsys, home):
    before = {path: path.stat().st_size for path in home.rglob("*")}
    status, out, err = call(capsys, *argv)
    assert status == 2 and says in err and out == "" and err.count("\n") == 1
    assert {path: path.stat().st_size for path in home.rglob("*")} == before


def test_a_run_of_the_embedded_task_on_a_model_holds_prompts_out(tmp_path):
    flags = {"model": "DIR", "task": "arithmetic", "eval_prompts": 7}
    stored = StoredModel(str(tmp_path), None, flags)
    settings = settings_of_stored("evaluate", stored, {}, Given(), 0)
    assert settings.models.model == str(tmp_path) and settings.evaluation.eval_prompts == 7
    with pytest.raises(SettingsError, match="--data=FILE is needed: the prompts"):
        settings_of_stored("evaluate", stored._replace(flags=flags | {"data": "texts.jsonl"}), {}, Given(), 0)


def test_a_run_whose_prompts_were_given_in_python_needs_data(capsys, tmp_path):
    prompts, small = [{"prompt": "1+1="}], TINY | {"steps": 1}
    run = funrl.train("grpo", prompts=prompts, reward=lambda p, c: 1.0, run_dir=str(tmp_path / "x"), **small)
    assert "--data=FILE is needed" in call(capsys, "evaluate", run.run_dir)[2]


@pytest.mark.parametrize("name", ["evaluate", "generate"])
def test_help(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    status, out, _ = call(capsys, name, "--help")
    assert status == 0 and out.startswith(f"funrl {name} MODEL") and "--temperature" in out and "--mesh=dp1" in out
    assert max(map(len, out.splitlines())) <= 100 and "--steps" not in out
