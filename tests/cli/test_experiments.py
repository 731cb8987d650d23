"""Every experiment as its command line runs it: quickly in a small size, and slowly until it has learned."""

import json
import math
import re
import runpy
import sys

import pytest
import torch
from selection import quick

from funrl.algos.recipes.dpo import dpo
from funrl.data.supervised import text_batch, text_example
from funrl.models import decoder_model, place
from funrl.models.huggingface import directories as hf
from funrl.tasks import arithmetic

pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules")  # runpy, of what an earlier test imported

REINFORCEMENT = (
    "ppo",
    "grpo",
    "dapo",
    "rloo",
    "remax",
    "reinforce_plus_plus",
    "gspo",
    "cispo",
    "prime",
    "vapo",
    "sao",
    "online_dpo",
)
RUN = ("ppo", "dapo", "remax", "prime", "vapo", "online_dpo")  # of these, the first of all that read the same
SUPERVISED = ("sft", "dpo", "kto", "reward_model", "process_reward_model")
COMMON = ("--device=cpu", "--compile=off", "--warmstart_steps=0", "--eval_every=2", "--eval_prompts=8")
QUICK = ("ppo", "dapo", "prime", "vapo", "sft", "dpo", "process_reward_model")
FILTERED = ("dapo", "prime", "online_dpo")  # those of REINFORCEMENT that have a filter


def run(name, capsys, *flags):
    """Exit status of `python -m funrl.experiments.NAME`, what it printed, and its errors."""
    argv = sys.argv
    sys.argv = [name, *flags]
    try:
        with pytest.raises(SystemExit) as stopped:
            runpy.run_module(f"funrl.experiments.{name}", run_name="__main__", alter_sys=True)
    finally:
        sys.argv = argv
    out, err = capsys.readouterr()
    return stopped.value.code, out, err


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def small(name, folder):
    rollout = ("--samples_per_prompt=2",) if name in REINFORCEMENT else ()
    refills = ("--max_refills=1", "--empty_filter=use") if name in FILTERED else ()  # an untrained model's are equal
    steps = ("--steps=3", "--critic_warmup_steps=1") if name in ("vapo", "sao") else ("--steps=2",)
    return (*COMMON, *rollout, *refills, *steps, "--batch_prompts=4", f"--run_dir={folder}")


@pytest.mark.parametrize("name", quick([*RUN, *SUPERVISED], QUICK))
def test_an_experiment_runs_and_leaves_its_files(name, tmp_path, capsys):
    status, out, err = run(name, capsys, *small(name, tmp_path))
    assert status == 0, err
    rows = metrics_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3][: len(rows)] and len(rows) >= 2
    assert {"config.json", "metrics.jsonl", "model", "report.html"} <= {p.name for p in tmp_path.iterdir()}
    assert "held out (n = 8): " in out and str(tmp_path) in out
    held = "eval/reward" if name in REINFORCEMENT else "eval/loss"
    assert held in rows[0] and held in rows[-1]
    if name in ("reward_model", "process_reward_model"):
        assert len(hf.check_directory(tmp_path / "model").shapes["value"]) == 1 + (name != "reward_model")
    else:
        assert hf.check_directory(tmp_path / "model").config.vocab == arithmetic.model_config().vocab
    used = {"vapo": "critic/vf_loss", "prime": "implicit_reward/loss", "dapo": "filter_groups/kept_share"}
    if name in used:
        assert used[name] in rows[-1]


@pytest.mark.parametrize("name", [*REINFORCEMENT, *SUPERVISED])
def test_help_names_every_argument_of_the_algorithm_and_no_flag_without_effect(name, capsys):
    status, out, _ = run(name, capsys, "--help")
    assert status == 0
    shown = {line.split()[0].split("=")[0] for line in out.splitlines() if line.startswith("  --")}
    assert ("--data" in shown) == (name in SUPERVISED) == ("--samples_per_prompt" not in shown)
    joined = re.sub(r"\n {20,}", " ", out)  # a text that is too long continues in the next line
    assert all(len(line.split(maxsplit=1)) == 2 for line in joined.splitlines() if line.startswith("  --"))


FAMILY = [  # tests/algos compares each loss with a formula, by its name
    ("--loss=0.8*sigmoid+0.2*bco", "--smoothing=0.1", "--margin=0.5", "--likelihood_coef=1"),
    ("--loss=sigmoid + 0.5*aot", "--smoothing=0.1"),
    ("--algorithm=simpo", "--beta=2"),
    ("--algorithm=orpo",),
    ("--algorithm=cpo",),
]


@pytest.mark.parametrize("flags", FAMILY, ids=" ".join)
def test_losses_of_the_family_of_dpo_learn(flags, tmp_path, capsys):
    status, _, err = run("dpo", capsys, *small("dpo", tmp_path), *flags)
    assert status == 0, err
    rows = metrics_of(tmp_path)
    assert len(rows) == 2 and all(math.isfinite(row["train/loss"]) and row["train/grad_norm"] > 0 for row in rows)


def test_a_sum_of_losses_is_the_sum_of_their_values():
    tokenizer = arithmetic.tokenizer()
    pairs = [
        text_example({"prompt": "1+1=", "chosen": a, "rejected": b}, "preferences", tokenizer)
        for a, b in (("2", "3"), ("02", "11"))
    ]
    batch = text_batch(pairs, 0)
    draw = torch.Generator().manual_seed(0)
    logp, ref = (-torch.rand(batch.mask.shape, generator=draw, dtype=torch.float64) for _ in range(2))
    batch = batch._replace(ref_logp=ref)

    def value(*args, **kwargs):
        return dpo(*args, **kwargs).losses["policy"](logp, batch)[0].item()

    whole = value("0.8*sigmoid+0.2*bco", smoothing=0.1)
    assert whole == pytest.approx(0.8 * value("sigmoid", smoothing=0.1) + 0.2 * value("bco"), rel=1e-12)
    assert value("sigmoid", margin=1.0) > value("sigmoid")
    likelihood = value(likelihood_coef=1.0) - value()
    assert value(likelihood_coef=0.3) == pytest.approx(value() + 0.3 * likelihood, rel=1e-12) and likelihood > 0


OWN = '''
from funrl.algos.core import Algorithm
from funrl.algos.recipes.grpo import grpo


def mine(clip: float = 0.5, kl: float = 0.0, max_new_tokens: int = 1, make=grpo) -> Algorithm:
    """GRPO of my own.

    Args:
      clip: both bounds
      kl: factor
    """
    assert max_new_tokens == 5, max_new_tokens
    return make(clip, clip, kl_coef=kl)


def broken() -> int:
    return 3
'''


def test_an_algorithm_of_ones_own(tmp_path, capsys):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    folder = tmp_path / "run"
    flags = (*small("grpo", folder), f"--algorithm={file}:mine", "--clip=0.25", "--max_new_tokens=5")
    status, _, err = run("grpo", capsys, *flags)
    assert status == 0, err
    config = json.loads((folder / "config.json").read_text())
    assert config["flags"]["clip"] == 0.25 and config["flags"]["algorithm"] == f"{file}:mine"
    assert config["flags"]["kl"] == 0.0 and "clip_low" not in config["flags"]


def test_an_argument_that_no_flag_can_say_keeps_its_default_and_is_refused_as_a_flag(tmp_path, capsys):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    flags = (*small("grpo", tmp_path / "run"), f"--algorithm={file}:mine", "--max_new_tokens=5")
    for name in ("--make=grpo", "--make"):
        status, _, err = run("grpo", capsys, *flags, name)
        assert status == 2 and "--make is not a flag: " in err and "give it in a FILE.py" in err
    status, out, _ = run("rl", capsys, "--algorithm=dr_grpo", "--help")
    assert status == 0 and "--clip_low" in out and "--make" not in out


@pytest.mark.slow
def test_gdpo_weighs_by_the_flag_that_weighs_rewards(tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1="}) + "\n" for n in range(8)))
    (tmp_path / "two.py").write_text(
        "def first(prompt, completion, **_):\n    return len(completion)\n\n\n"
        "def second(prompt, completion, **_):\n    return completion.count('1')\n"
    )
    first, second = (f"{tmp_path / 'two.py'}:{name}" for name in ("first", "second"))
    model = tmp_path / "model"
    start = decoder_model(arithmetic.model_config())
    hf.save(model, start, start.init(torch.Generator().manual_seed(0)), arithmetic.tokenizer())
    flags = ("--algorithm=gdpo", f"--model={model}", f"--prompts={tmp_path / 'p.jsonl'}", "--max_new_tokens=6")
    seen = {}
    for weights in ("1,1", "1,-1", "1,x", "1"):
        folder = tmp_path / f"run {weights}"
        given = (f"--reward={first},{second}", f"--reward_weights={weights}")
        given = (f"--reward={first},{second}@-1",) if weights == "1,-1" else given
        status, _, err = run("grpo", capsys, *small("grpo", folder), *flags, *given)
        if status:
            assert status == 2 and f"reward_weights={weights}" in err
        else:
            seen[weights] = metrics_of(folder)[0]
    assert set(seen) == {"1,1", "1,-1"}
    assert seen["1,1"]["reward/first/mean"] == seen["1,-1"]["reward/first/mean"]
    assert seen["1,1"]["critic/advantages/max"] != seen["1,-1"]["critic/advantages/max"]


@pytest.mark.parametrize(
    ("source", "message"),
    [("own.py:nothing", "has no 'nothing'; its functions: "), ("absent.py:mine", "no such file"), ("own", "write ")],
)
def test_an_algorithm_that_is_not_there(source, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    status, _, err = run("grpo", capsys, f"--algorithm={source}")
    assert status == 2 and message in err and f"--algorithm={source}" in err


def test_a_choice_that_is_none_is_refused(capsys, tmp_path):
    status, _, err = run("dpo", capsys, *small("dpo", tmp_path), "--loss=wrong")
    assert status == 2 and "loss=wrong: it must be one of sigmoid" in err
    for flags, item in (
        (("--loss=sigmoid+sigmoid",), "it must be one of sigmoid"),
        (("--loss=ipo", "--margin=1"), "margin=1.0"),
        (("--loss=aot", "--per_token"), "per_token"),
    ):
        status, _, err = run("dpo", capsys, *small("dpo", tmp_path), *flags)
        assert status == 2 and item in err
    status, _, err = run("reward_model", capsys, *small("reward_model", tmp_path), "--margin")
    assert status == 2 and "margin" in err
    status, _, err = run("sft", capsys, *small("sft", tmp_path), "--model=somewhere")
    assert status == 2 and "somewhere" in err


@pytest.mark.slow
@pytest.mark.gloo
def test_a_mesh_does_not_change_what_is_learned(tmp_path, capsys):
    """As a command runs it; tests/trainer/test_named_on_meshes.py has a step of the others."""
    name, losses = "reward_model", []
    for mesh in ("dp1", "dp2,tp2"):
        folder = tmp_path / mesh
        flags = (*small(name, folder), "--dtype=float64", f"--mesh={mesh}", "--token_budget=64")
        status, _, err = run(name, capsys, *flags)
        assert status == 0, err
        losses.append([row["train/loss"] for row in metrics_of(folder)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)


def test_a_reward_model_opens_in_transformers_with_the_same_rewards(tmp_path, capsys):
    from transformers import AutoModelForSequenceClassification

    status, _, err = run("reward_model", capsys, *small("reward_model", tmp_path), "--lr=0.01")
    assert status == 0, err
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert theirs.config.num_labels == 1
    model, params = hf.load(tmp_path / "model", torch.float32)
    record = {"prompt": "12+34=", "chosen": "64", "rejected": "81"}
    first = text_example(record, "preferences", arithmetic.tokenizer())
    batch = text_batch([first], 0, reader=True)
    message = place(model).values(params, batch)
    for text, reward in zip(first.texts, message[batch.mask], strict=True):
        logit = theirs(torch.tensor([text.tokens])).logits[0, 0]
        assert logit.item() == pytest.approx(reward.item(), abs=1e-5) and abs(logit) > 1e-4


WARM = ("--device=cpu", "--compile=off", "--eval_prompts=128")  # with the whole warm start


# A critic, and pairs. The others differ by a formula, which tests/algos compares with loops; GRPO, with groups, learns
# by Muon below, and tests/trainer/test_roles.py has the implicit rewards of PRIME.
LEARNS = ("ppo", "online_dpo")


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNS)
def test_an_experiment_raises_the_reward(name, tmp_path, capsys):
    status, _, err = run(name, capsys, *WARM, "--steps=2", f"--run_dir={tmp_path}")
    assert status == 0, err
    metrics = metrics_of(tmp_path)
    assert metrics[0]["eval/reward"] > 0.1  # by the demonstrations of the warm start
    assert metrics[-1]["eval/reward"] > metrics[0]["eval/reward"] + 0.1


@pytest.mark.slow
def test_muon_raises_the_reward(tmp_path, capsys):
    status, _, err = run("grpo", capsys, *WARM, "--optimizer=muon", "--steps=2", f"--run_dir={tmp_path}")
    assert status == 0, err
    metrics = metrics_of(tmp_path)
    assert metrics[-1]["eval/reward"] > metrics[0]["eval/reward"] + 0.1


@pytest.mark.slow
def test_dpo_learns_the_preference_and_to_add(tmp_path, capsys):
    status, _, err = run("dpo", capsys, *WARM, "--likelihood_coef=1", "--steps=4", f"--run_dir={tmp_path}")
    assert status == 0, err
    first, last = metrics_of(tmp_path)[0], metrics_of(tmp_path)[-1]
    assert first["eval/margin"] == 0 and last["eval/margin"] > 0.2 and last["eval/accuracy"] > 0.95
    assert last["eval/chosen"] > 0  # sums have become more probable


@pytest.mark.slow
def test_reward_model_learns_the_preference(tmp_path, capsys):
    status, _, err = run("reward_model", capsys, *WARM, "--steps=10", "--lr=1e-3", f"--run_dir={tmp_path}")
    assert status == 0, err
    first, last = metrics_of(tmp_path)[0], metrics_of(tmp_path)[-1]
    assert last["eval/loss"] < 0.64 < first["eval/loss"] and last["eval/margin"] > first["eval/margin"] + 0.1
