"""A run knows what it began from: what a resume may change and what it may not, and what each start leaves written."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from funrl.cli import main as cli
from funrl.cli import run as experiments
from funrl.cli.run import main
from funrl.models import decoder_model
from funrl.models.huggingface import directories as hf
from funrl.tasks import arithmetic
from funrl.trainer.checkpoints.checkpoint import recorded
from funrl.trainer.storage.shard_server import CheckpointError, record_digest

TINY = (
    "--device=cpu",
    "--compile=off",
    "--batch_prompts=4",
    "--eval_prompts=2",
    "--eval_every=2",
    "--warmstart_steps=0",
    "--samples_per_prompt=2",
    "--max_new_tokens=4",
    "--save_every=1",
    "--save_rollouts=1",
    "--reward_workers=0",
)
REWARD = "def digits(prompt, completion):\n    return sum(map(completion.count, '12345')) - completion.count('+')\n"


@pytest.fixture(scope="module")
def began(tmp_path_factory):
    """A folder with a model, prompts, a reward, and RUN, which has made two steps with them."""
    folder = tmp_path_factory.mktemp("began")
    model, tokenizer = decoder_model(arithmetic.model_config()), arithmetic.tokenizer()
    hf.save(folder / "model", model, model.init(torch.Generator().manual_seed(0)), tokenizer)
    (folder / "p.jsonl").write_text("".join(f'{{"prompt": "{i}+{i}="}}\n' for i in range(1, 9)))
    (folder / "r.py").write_text(REWARD)
    assert call("grpo", folder, "--steps=2") == 0
    return folder


@pytest.fixture
def own(began, tmp_path, monkeypatch):
    """A copy of that folder, at another place, in which no file of Python has been run."""
    shutil.copytree(began, tmp_path / "own")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "own"


def call(name, folder, *flags, run="RUN"):
    files = (f"--model={folder}/model", f"--prompts={folder}/p.jsonl", f"--reward={folder}/r.py:digits")
    return main(name, [name, *TINY, *files, f"--run_dir={folder}/{run}", *flags])


def config(folder):
    return json.loads((folder / "RUN" / "config.json").read_text())


def edit(path, change):
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def swap_tokens(record):
    vocab = record["model"]["vocab"]
    vocab["1"], vocab["2"] = vocab["2"], vocab["1"]


def other_model(**fields):
    return lambda folder: edit(folder / "model" / "config.json", lambda record: record.update(fields))


REFUSED = {
    **{name: (name, lambda _: None, f"recipe grpo, this one has {name}; ") for name in ("gspo", "dr_grpo", "ppo")},
    "rope_theta": ("grpo", other_model(rope_theta=500.0), "rope_theta 100.0, this one has 500.0; "),
    "norm_eps": ("grpo", other_model(rms_norm_eps=0.25), "norm_eps 1e-06, this one has 0.25; "),
    "tokenizer": ("grpo", lambda own: edit(own / "model" / "tokenizer.json", swap_tokens), "tokenizer "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_recipe_model_or_tokenizer_is_refused_before_ranks_start(case, own, monkeypatch, capsys):
    name, change, message = REFUSED[case]
    change(own)
    monkeypatch.setattr(experiments, "_run", lambda *_: pytest.fail("it was started"))
    before = {path: path.read_bytes() for path in (own / "RUN").rglob("*") if path.is_file()}
    assert call(name, own, "--steps=4", "--resume") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"error: --resume: {own}/RUN/checkpoints/step-2 is of a run with {message}"), line
    assert "another --run_dir" in line
    way = f"funrl export {own}/RUN --to=DIR" if name != "grpo" else f"--model={own}/model has changed, or is another"
    assert way in line
    assert before == {path: path.read_bytes() for path in (own / "RUN").rglob("*") if path.is_file()}


def test_a_resume_that_the_ranks_refuse_leaves_the_record_of_the_run(own, capsys):
    before = (own / "RUN" / "config.json").read_bytes()
    assert call("grpo", own, "--steps=4", "--resume", "--new_tokens_per_step=2") == 1
    assert "it holds the state of another run" in capsys.readouterr().err
    assert (own / "RUN" / "config.json").read_bytes() == before
    assert call("grpo", own, "--steps=2", "--resume") == 0  # as it was, with nothing of the one that was refused
    assert [row["step"] for row in config(own)["segments"]] == [0, 2]


@pytest.mark.slow
def test_other_flags_and_files_are_said_and_each_start_keeps_its_own(own, capsys):
    with open(own / "p.jsonl", "a") as file:
        file.write('{"prompt": "9+9="}\n')
    (own / "r.py").write_text(REWARD.replace("12345", "678"))
    assert call("grpo", own, "--steps=3", "--resume", "--lr=3e-5") == 0
    captured = capsys.readouterr()
    assert "continuing with other flags: " in captured.err and f"/model -> {own}/model" in captured.err
    assert "lr none -> 3e-05" in captured.err and "steps 2 -> 3" in captured.err
    assert "continuing with other contents of: prompts, reward\n" in captured.err
    first, second = config(own)["segments"]
    assert (first["step"], first["flags"]["lr"], second["step"], second["flags"]["lr"]) == (0, None, 2, 3e-5)
    assert config(own)["flags"] == second["flags"] and config(own)["inputs"] == second["inputs"]
    assert [name for name, x in first["inputs"].items() if x != second["inputs"][name]] == [
        "prompts",
        "reward",
        "held-out set",
        "tokens of the records",
    ]
    facts = recorded(own / "RUN/checkpoints/step-3").facts
    assert facts["provenance"]["inputs"] == second["inputs"] and facts["provenance"]["flags"]["lr"] == 3e-5
    assert facts["run"]["recipe"] == "grpo"


@pytest.mark.slow
def test_steps_are_replayed_and_compared_with_the_flags_of_their_start(own, capsys):
    shutil.copytree(own / "RUN", own / "AS_IT_WAS")
    assert call("grpo", own, "--steps=3", "--resume", "--lr=3e-5") == 0
    assert cli.main(["funrl", "replay", f"{own}/RUN", "--step=3"]) == 0
    assert cli.main(["funrl", "replay", f"{own}/RUN", "--step=2"]) == 0  # with the flags of its start
    assert "step 2: the same bits" in capsys.readouterr().out
    assert cli.main(["funrl", "replay", f"{own}/RUN", f"{own}/AS_IT_WAS"]) == 0
    assert "--lr: None, 3e-05 after step 2 and None" in capsys.readouterr().out
    assert "<tr><th>lr</th><td>None, 3e-05 after step 2</td></tr>" in (own / "RUN" / "report.html").read_text()
    shutil.rmtree(own / "RUN/checkpoints/step-2")
    assert cli.main(["funrl", "replay", f"{own}/RUN", "--step=3"]) == 2
    assert (
        "the newest checkpoint before it is of step 0, and step 1 was made with other flags" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_two_runs_of_one_command_that_read_other_weights_differ_in_a_line(own, capsys):
    model = decoder_model(arithmetic.model_config())
    hf.save(own / "model", model, model.init(torch.Generator().manual_seed(1)), arithmetic.tokenizer())
    assert call("grpo", own, "--steps=1", run="OTHER") == 0
    capsys.readouterr()
    assert cli.main(["funrl", "replay", f"{own}/RUN", f"{own}/OTHER"]) == 1
    assert "digests that differ: model/weights\n" in capsys.readouterr().out
    assert cli.main(["funrl", "compare", f"{own}/RUN", f"{own}/OTHER", f"--to={own}/c.html"]) == 0
    assert "<tr><th>digest of model/weights</th>" in (own / "c.html").read_text()


@pytest.mark.slow
def test_the_last_line_compares_evaluations_on_one_held_out_set(own, capsys):
    (own / "held.jsonl").write_text('{"prompt": "11+11="}\n{"prompt": "1+22="}\n{"prompt": "33+1="}\n')
    assert call("grpo", own, "--steps=3", "--resume", f"--eval_data={own}/held.jsonl") == 0
    out = capsys.readouterr().out
    assert "held-out examples, their rewards or their sampling are not as they were: " in " ".join(out.split())
    assert call("grpo", own, "--steps=4", "--resume", f"--eval_data={own}/held.jsonl") == 0
    again = capsys.readouterr().out
    assert "held-out examples" not in again

    def first(text):
        line = next(line for line in text.splitlines() if line.startswith("held out (n = 2): "))
        return line.partition("eval/reward ")[2].split()[0]

    table = [json.loads(line) for line in (own / "RUN/eval_samples.jsonl").read_text().splitlines()]
    rewards = [row["reward"] for row in table if row["step"] == 2 and row["prompt"] in ("11+11=", "1+22=", "33+1=")]
    assert len(rewards) == 2 and first(out) == first(again) == f"{sum(rewards) / 2:.3f}"


@pytest.mark.slow
def test_a_resume_says_that_records_give_other_tokens(own, capsys):
    """As they may with another version of funrl or of transformers."""
    assert call("grpo", own, "--steps=3", "--resume") == 0
    assert "other tokens" not in capsys.readouterr().err
    path = own / "RUN" / "checkpoints" / "step-3" / "complete.json"
    facts = json.loads(path.read_text())
    assert len(facts["provenance"]["inputs"].pop("tokens of the records")) == 16
    facts["provenance"]["inputs"]["tokens of the records"] = "0" * 16
    del facts["digest"]
    path.write_text(json.dumps({**facts, "digest": record_digest(facts)}))
    assert call("grpo", own, "--steps=4", "--resume") == 0
    assert "the records give other tokens than when the checkpoint was written" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_of_an_earlier_version_goes_on(own):
    """Such a run has neither segments nor digests, and its checkpoints know sizes of the model alone."""
    edit(own / "RUN" / "config.json", lambda record: [record.pop(name) for name in ("segments", "inputs")])
    for path in (own / "RUN" / "checkpoints").glob("step-*/complete.json"):
        facts = json.loads(path.read_text())
        del facts["provenance"], facts["digest"]
        sizes = (
            "learns",
            "optimizer",
            "family",
            "vocab",
            "embed",
            "layers",
            "heads",
            "kv_heads",
            "head",
            "mlp",
            "tied",
        )
        facts["run"] = {name: facts["run"][name] for name in sizes}
        path.write_text(json.dumps({**facts, "digest": record_digest(facts)}))
    assert call("grpo", own, "--steps=3", "--resume", "--lr=3e-5") == 0
    assert [(row["step"], row["flags"]["lr"]) for row in config(own)["segments"]] == [(0, None), (2, 3e-5)]
    assert cli.main(["funrl", "replay", f"{own}/RUN", "--step=2"]) == 0


@pytest.mark.slow
def test_a_run_in_python_keeps_and_compares_the_same(own, monkeypatch, capsys):
    import funrl

    def train(recipe, **more):
        small = {"batch_prompts": 4, "samples_per_prompt": 2, "max_new_tokens": 4, "save_every": "1", "eval_prompts": 2}
        records = [{"prompt": f"{i}+{i}="} for i in range(1, 9)]
        return funrl.train(
            recipe,
            model=own / "model",
            prompts=records,
            reward=lambda prompt, completion: float(len(completion)),
            run_dir=str(own / "PYTHON"),
            warmstart_steps=0,
            device="cpu",
            reward_workers=0,
            **small,
            **more,
        )

    train("grpo", steps=1)
    with pytest.raises(CheckpointError, match="recipe grpo, this one has gspo"):
        train("gspo", steps=2, resume=True)
    train("grpo", steps=2, resume=True, lr=1e-4)
    assert "continuing with other flags: " in capsys.readouterr().err
    record = json.loads((own / "PYTHON/config.json").read_text())
    assert [row["step"] for row in record["segments"]] == [0, 1]
    assert {"prompts", "reward", "model/config.json", "model/tokenizer", "model/weights"} <= set(record["inputs"])
    assert Path(own / "PYTHON/model").is_dir()
