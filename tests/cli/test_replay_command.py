"""`funrl replay`, as one types it."""

import json
import math
import shutil

import pytest

from funrl.cli import main as cli
from funrl.cli.replay import verdict_lines
from funrl.cli.run import main
from funrl.trainer.differences import Difference
from funrl.trainer.replay import Replayed

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
    "--save_rollouts=1",
    "--reward_workers=0",
)
REWARD = """
def digits(prompt, completion):
    return sum(map(completion.count, "12345")) - completion.count("+")
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three runs: one, the same again, and one with another learning rate."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "p.jsonl").write_text("".join(f'{{"prompt": "{i}+{i}="}}\n' for i in range(1, 9)))
    (folder / "r.py").write_text(REWARD)
    for name, more in {"one": (), "same": (), "other": ("--lr=2e-3",)}.items():
        flags = [f"--prompts={folder}/p.jsonl", f"--reward={folder}/r.py:digits", f"--run_dir={folder}/{name}", *more]
        assert main("grpo", ["grpo", *TINY, *flags]) == 0
    return folder


def said(capsys, *argv):
    """Exit status, and what is printed."""
    capsys.readouterr()
    status = cli.main(["funrl", *map(str, argv)])
    out, err = capsys.readouterr()
    return status, out + err


@pytest.mark.slow
def test_a_step_is_replayed(runs, capsys):
    status, text = said(capsys, "replay", runs / "one", "--step=2")
    assert status == 0 and "step-1\nstep 2: the same bits\n" in text
    assert "  score_policy          equal: old_logp, " in text
    for line in ("advantage ", "update_policy "):
        assert line in text


@pytest.mark.slow
def test_all_steps_are_replayed(runs, capsys):
    status, text = said(capsys, "replay", runs / "one", "--rows")
    assert status == 0 and "from the weights that the run began with" in text
    assert "step 1: the same bits\n" in text and "step 2: the same bits\n" in text


ENVIRONMENT = """
def again(messages, **fields):
    return "1" if len(messages) < 3 else float(len(messages[-1]["content"]))
"""
TEMPLATE = "{% for m in messages %}={{ m['content'] }}-{% endfor %}{% if add_generation_prompt %}={% endif %}"


@pytest.mark.slow
@pytest.mark.gloo
def test_episodes_are_generated_again_without_their_environment(runs, tmp_path, capsys):
    (tmp_path / "e.py").write_text(ENVIRONMENT)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    folder = tmp_path / "run"
    flags = [f"--prompts={runs}/p.jsonl", f"--env={tmp_path}/e.py:again", f"--chat_template={tmp_path}/chat.jinja"]
    tiny = [flag for flag in TINY if not flag.startswith("--reward_workers")]
    flags += ["--place=generate:1", "--staleness=2", "--window=3", f"--run_dir={folder}"]
    assert main("rollout_is", ["rollout_is", *tiny, *flags]) == 0
    (tmp_path / "e.py").unlink()
    for argv in ([], ["--step=2", "--rows"]):
        status, text = said(capsys, "replay", folder, *argv)
        assert status == 0 and "step 2: the same bits\n" in text, text
        assert ("turns of the episodes" in text) == ("--rows" not in argv)
    for file in folder.glob("rollouts/*/episodes-*.jsonl"):
        file.unlink()
    status, text = said(capsys, "replay", folder)
    assert status == 2 and "has no episodes, which a run with an environment and --save_rollouts keeps" in text


def test_the_first_step_after_a_warm_start_is_replayed(tmp_path, capsys):
    tiny = [flag for flag in TINY if not flag.startswith(("--warmstart", "--save_every", "--steps"))]
    folder = tmp_path / "run"
    flags = ["--warmstart_steps=1", "--save_every=0", "--steps=1", f"--run_dir={folder}"]
    assert main("grpo", ["grpo", *tiny, *flags]) == 0
    status, text = said(capsys, "replay", folder, "--step=1")
    assert status == 0 and "from the weights that the run began with" in text and "the same bits" in text


@pytest.mark.slow
def test_a_step_that_differs_is_said_with_what_differs(runs, tmp_path, capsys):
    shutil.copytree(runs / "one", tmp_path / "one")
    file = tmp_path / "one/rollouts/step-2/record.json"
    record = json.loads(file.read_text())
    loss = record["metrics"]["learned"]["actor/pg_loss"]
    record["metrics"]["learned"]["actor/pg_loss"] = loss + 0.25
    file.write_text(json.dumps(record))
    status, text = said(capsys, "replay", tmp_path / "one", "--step=2", "--tolerance=1e-3")
    assert status == 1 and "step 2: differs\n" in text and "actor/pg_loss differs by 0.25: " in text
    assert said(capsys, "replay", tmp_path / "one", "--step=2", "--tolerance=0.3")[0] == 0


def test_digests_of_weights_decide_unless_there_is_a_tolerance():
    digests = "weights of policy by their digests"
    repeated = Replayed(
        2, [Difference("update_policy", "digests", digests, 3, count=1, largest=math.inf, where="embed")]
    )
    lines, agrees = verdict_lines(repeated, 0.0)
    assert not agrees and lines[0] == "step 2: differs" and digests in lines[1]
    assert verdict_lines(repeated, 1e-3) == (["step 2: agrees"], True)


@pytest.mark.slow
def test_two_runs_of_one_command_do_not_differ(runs, capsys):
    status, text = said(capsys, "replay", runs / "one", runs / "same")
    assert (status, text.splitlines()[-1]) == (
        0,
        "no difference up to step 2; compared: metrics of 2 steps, rows of 2 steps, checkpoints of 2 steps",
    )


@pytest.mark.parametrize(
    ("without", "first"),
    [
        (("checkpoints",), "first difference: step 1, phase update_policy\n  weights of policy by their digests: "),
        ((), "first difference: step 1, phase update_policy\n  roles/policy/params/embed: "),
        (("rollouts", "checkpoints"), "first difference: step 1, phase update_policy\n  actor/"),
    ],
    ids=["rows", "all", "metrics"],
)
def test_the_first_difference_is_named(runs, without, first, tmp_path, capsys):
    for name in ("one", "other"):
        shutil.copytree(runs / name, tmp_path / name, ignore=shutil.ignore_patterns(*without))
    status, text = said(capsys, "replay", tmp_path / "one", tmp_path / "other")
    assert status == 1 and text.startswith("flags that differ: --lr: None and 0.002\n") and first in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["replay"], "usage: funrl replay RUN_DIR [RUN_DIR] [--rows] [--step=N]"),
        (["replay", "RUN", "OTHER", "--step=2"], "--step is for repeating a run; two runs are compared as they are"),
        (["replay", "RUN", "--step=0"], "--step=0: it must be at least 1"),
        (["replay", "nowhere", "--step=1"], "nowhere/config.json: not the config.json of a run: No such file"),
        (["replay", "RUN", "--step=7"], "has no rows of step 3, which --save_rollouts keeps; there are: 1, 2"),
        (["replay", "RUN", "--step=1", "--mesh=dp3,tp5"], "--mesh=dp3,tp5: "),
        (["bisect", "RUN"], "`funrl replay RUN OTHER_RUN` compares two runs"),
        (["replay", "RUN", "nowhere"], "nowhere/config.json: not the config.json of a run: No such file"),
    ],
)
def test_what_cannot_be_replayed_or_compared(argv, message, runs, capsys):
    status, text = said(capsys, *(str(runs / "one") if word == "RUN" else word for word in argv))
    assert status == 2 and text.splitlines()[-1].startswith("error: ") and message in text.splitlines()[-1]
