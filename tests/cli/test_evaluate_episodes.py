"""`funrl evaluate --env` and `funrl generate --env`: by episode, with transcripts."""

import json
from pathlib import Path

import pytest

import funrl
from funrl.cli import main as cli

TINY = {
    "steps": 1,
    "batch_prompts": 4,
    "samples_per_prompt": 2,
    "eval_prompts": 4,
    "device": "cpu",
    "compile": "off",
    "max_new_tokens": 3,
    "warmstart_steps": 0,
}
OWN = '''
def twice(messages, **fields):
    """Says 1 once, then rewards a last reply with an odd number of characters."""
    return "1" if len(messages) < 3 else float(len(messages[-1]["content"]) % 2)
'''
TEMPLATE = "{% for m in messages %}={{ m['content'] }}-{% endfor %}{% if add_generation_prompt %}={% endif %}"
SAMPLED = ["--limit=3", "--samples=4", "--temperature=1", "--device=cpu"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a run of an environment of its own, and one of the calculator."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "own.py").write_text(OWN)
    (folder / "chat.jinja").write_text(TEMPLATE)
    rows = [{"prompt": f"{n}+{n}=", "answer": str(n)} for n in range(20)]
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"prompts": "p.jsonl", "env": "own.py:twice", "chat_template": "chat.jinja", "episode_turns": 5}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        funrl.train("grpo", run_dir="own", **own, **TINY)
        calculator = TINY | {"max_new_tokens": 12}
        funrl.train("grpo", task="calculator", episode_turns=3, run_dir="calculator", **calculator)
    return folder


@pytest.fixture(autouse=True)
def there(home, monkeypatch):
    monkeypatch.chdir(home)


def call(capsys, *argv):
    status = cli.main(["funrl", *map(str, argv)])
    return status, *capsys.readouterr()


def unmeasured(metrics):
    """Metrics without those of the machine and its load."""
    return {name: value for name, value in metrics.items() if not name.endswith(("environment_s", "recomputed_tokens"))}


@pytest.mark.parametrize("run", ["own", "calculator"])
def test_the_evaluation_of_a_run_is_the_one_that_it_made(run, tmp_path):
    evaluation = funrl.evaluate(run, output=tmp_path / "a", device="cpu")
    row = json.loads(Path(run, "metrics.jsonl").read_text().splitlines()[-1])
    expected = {key: value for key, value in row.items() if key.startswith("eval/")}
    assert unmeasured(evaluation.metrics) == unmeasured(expected)
    assert evaluation.metrics["eval/episodes/turns"] >= 1 and len(evaluation.rows) == evaluation.prompts


@pytest.mark.slow
@pytest.mark.gloo
def test_episodes_have_pass_at_k_and_transcripts_on_every_mesh(capsys, tmp_path):
    results = []
    for mesh in ("dp1", "dp2"):
        flags = ["--data=p.jsonl", "--env=own.py:twice", f"--mesh={mesh}", f"--output={tmp_path / mesh}", *SAMPLED]
        status, out, _ = call(capsys, "evaluate", "own/model", *flags, "--max_new_tokens=3")
        assert status == 0 and "3 prompts, 4 episodes of each" in out and "tokens per episode" in out
        assert "pass@4" in out and "accuracy (mean@4)" in out and "episodes/turns" in out
        rows = [json.loads(line) for line in (tmp_path / mesh / "eval_samples.jsonl").read_text().splitlines()]
        results.append((rows, unmeasured(json.loads((tmp_path / mesh / "evaluation.json").read_text())["metrics"])))
    assert results[0] == results[1]
    for row in results[0][0]:
        _, middle, last = row["completion"].partition("-=1-=")  # the environment's turn stands between
        assert middle and row["reward"] == len(last) % 2


def test_from_python_with_an_environment_in_memory(tmp_path):
    def graded(messages, *, wanted, **fields):
        return float(wanted)

    data = [{"prompt": "1+1=", "wanted": 0.25}, {"prompt": "3+4=", "wanted": 0.75}]
    own = {"max_new_tokens": 3, "device": "cpu", "output": tmp_path / "x"}
    evaluation = funrl.evaluate("own", data=data, env=graded, **own)
    assert evaluation.metrics["eval/reward"] == 0.5 and [row["reward"] for row in evaluation.rows] == [0.25, 0.75]


def test_transcripts_are_generated(capsys):
    flags = ["--prompts=p.jsonl", "--env=own.py:twice", *SAMPLED]
    status, out, _ = call(capsys, "generate", "own", *flags)
    rows = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and len(rows) == 12 and all("-=1-=" in row["completion"] for row in rows)
    assert "-=1-=" not in call(capsys, "generate", "own", "1+1=", "--device=cpu")[1]  # without it, one completion


@pytest.mark.parametrize(
    "argv,message",
    [
        (["own/model", "--data=p.jsonl"], "or an --env=FILE.py:NAME"),
        (["own", "--data=p.jsonl", "--env=own.py:gone"], "own.py has no 'gone'"),
        (["own", "--data=p.jsonl", "--env=own.py:twice", "--judge=x"], "a judge reads single completions"),
        (["own", "--data=p.jsonl", "--env=own.py:twice", "--reward=math"], "the environment rewards its episodes"),
        (["calculator", "--env=own.py:twice"], "--env=own.py:twice needs --data=FILE.jsonl"),
    ],
)
def test_what_cannot_work_is_said_in_a_line(argv, message, capsys):
    status, out, err = call(capsys, "evaluate", *argv)
    assert status == 2 and message in err and out == "" and err.count("\n") == 1
