"""`funrl export` takes the place of nothing that is not its own, and says which step it took."""

import json

import pytest

from funrl.cli import main as cli
from funrl.cli.run import main
from funrl.models.huggingface import directories as hf

TINY = (
    "--device=cpu",
    "--compile=off",
    "--batch_prompts=4",
    "--eval_prompts=2",
    "--warmstart_steps=0",
    "--samples_per_prompt=2",
    "--max_new_tokens=4",
    "--save_every=1",
    "--reward_workers=0",
    "--lr=1e-2",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """RUN, and ADAPTED, a run of adapters on its model."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "p.jsonl").write_text("".join(f'{{"prompt": "{i}+{i}="}}\n' for i in range(1, 9)))
    (folder / "r.py").write_text("def score(prompt, completion):\n    return sum(map(completion.count, '12345'))\n")
    data = (f"--prompts={folder}/p.jsonl", f"--reward={folder}/r.py:score")
    assert main("grpo", ["grpo", *TINY, *data, f"--run_dir={folder}/RUN", "--steps=2"]) == 0
    adapted = ("--lora_rank=2", f"--model={folder}/RUN/model", f"--run_dir={folder}/ADAPTED", "--steps=1")
    assert main("grpo", ["grpo", *TINY, *data, *adapted]) == 0
    return folder


def export(capsys, *argv):
    """Exit status, and what is printed."""
    capsys.readouterr()
    status = cli.main(["funrl", "export", *map(str, argv)])
    out, err = capsys.readouterr()
    return status, out + err


def content(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "pytorch_model.bin"])
def test_a_model_or_a_part_of_one_is_not_overwritten(name, runs, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text("precious")
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    status, text = export(capsys, runs / "RUN", f"--to={tmp_path}/mine")
    assert status == 2 and text == (
        f"error: --to={tmp_path}/mine: holds {name}, which would be lost; give another directory, or --overwrite\n"
    )
    assert content(tmp_path / "mine") == {name: b"precious", "notes.txt": b"mine"}
    status, text = export(capsys, runs / "RUN", f"--to={tmp_path}/mine", "--overwrite")
    assert (status, text) == (0, f"the model after step 2 is in {tmp_path}/mine\n")
    assert content(tmp_path / "mine") == content(runs / "RUN" / "model") | {"notes.txt": b"mine"}


@pytest.mark.slow
def test_another_step_is_not_overwritten_and_the_step_is_said(runs, tmp_path, capsys):
    to = f"--to={tmp_path}/step"
    assert export(capsys, runs / "RUN", "--step=1", to) == (0, f"the model after step 1 is in {tmp_path}/step\n")
    before = content(tmp_path / "step")
    status, text = export(capsys, runs / "RUN", to)
    assert status == 2 and "holds config.json, " in text and content(tmp_path / "step") == before
    for _ in range(2):  # the name of its own says which step it is of
        assert export(capsys, runs / "RUN", "--step=1")[0] == 0
    assert content(runs / "RUN" / "model-step-1") == before != content(runs / "RUN" / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step"]


@pytest.mark.parametrize(
    ("run", "to", "message"),
    [
        ("RUN", "RUN", "this is the directory of the run"),
        ("RUN", "RUN/checkpoints/model", "this is what every export of the run needs"),
        ("ADAPTED", "RUN/model", "this is the model that the run began with"),
        ("RUN", "p.jsonl", "this is a file, a directory is needed"),
    ],
)
def test_what_a_run_needs_is_never_overwritten(run, to, message, runs, capsys):
    place = runs / to
    before = content(place) if place.is_dir() else place.read_bytes()
    status, text = export(capsys, runs / run, f"--to={place}", "--overwrite")
    assert (
        status == 2
        and text == f"error: --to={place}: {message}" + ("" if "file" in message else "; give another directory") + "\n"
    )
    assert before == (content(place) if place.is_dir() else place.read_bytes())


@pytest.mark.slow
def test_an_export_that_fails_leaves_what_was_there(runs, tmp_path, capsys, monkeypatch):
    assert export(capsys, runs / "ADAPTED", f"--to={tmp_path}/peft", "--adapter")[1].startswith(
        "the adapter after step 1"
    )
    before, write = content(tmp_path / "peft"), hf.write

    def cut(*args, **more):
        write(*args, **more)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf, "write", cut)
    status, text = export(capsys, runs / "RUN", f"--to={tmp_path}/peft", "--overwrite")
    assert status == 2 and "No space left" in text
    assert content(tmp_path / "peft") == before and sorted(path.name for path in tmp_path.iterdir()) == ["peft"]
    monkeypatch.undo()
    assert export(capsys, runs / "RUN", f"--to={tmp_path}/peft", "--overwrite")[0] == 0
    assert content(tmp_path / "peft") == content(runs / "RUN" / "model")  # nothing of the adapters is left
    assert json.loads((tmp_path / "peft/config.json").read_text())["model_type"] == "llama"
