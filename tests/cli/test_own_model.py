"""A real model, own prompts and an own reward: the reward rises, and transformers loads what was trained."""

import json
import os
import re
from pathlib import Path

import pytest
import torch

from funrl import trees
from funrl.cli.run import main
from funrl.mesh.mesh import single
from funrl.models import Inputs
from funrl.models.huggingface import directories as hf
from funrl.rollout.engine import complete
from funrl.rollout.native.engine import native_engine
from funrl.rollout.requests import requests_of
from funrl.rollout.sampling_parameters import Sampling

ROOT = Path(__file__).parents[2]
MODEL = Path(os.environ.get("FUNRL_DATA", ROOT.parent / "shared" / "data")) / "stories260k"
ANIMALS = ROOT / "examples" / "animals"
pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(not MODEL.is_dir(), reason=f"{MODEL} is not there; FUNRL_DATA names the folder that has it"),
]
FLAGS = [
    f"--model={MODEL}",
    f"--prompts={ANIMALS / 'prompts.jsonl'}",
    f"--reward={ANIMALS / 'reward.py'}:score",
    "--device=cpu",
]


def run(run_dir, *flags):
    assert main("ppo", ["ppo", *FLAGS, f"--run_dir={run_dir}", *flags]) == 0
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def check_loads_in_transformers(folder):
    """The same logits, and the same greedy continuation of a prompt, as by this project."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    model, params = hf.load(folder, torch.float32)
    ids = torch.tensor([tokenizer.encode("Once upon a time, there was a big")])
    with torch.no_grad():
        hidden_BTD = model.apply(params, Inputs(ids)).hidden
        torch.testing.assert_close(hidden_BTD @ model.unembed(params).T, theirs(ids).logits, rtol=0, atol=2e-5)
        continued = theirs.generate(ids, do_sample=False, max_new_tokens=24)[0, ids.shape[1] :].tolist()
    engine = native_engine(model, single(), torch.float32)
    engine.load(trees.named(params))
    how = Sampling(max_new_tokens=24, stop=model.config.special_tokens.eos, greedy=True)
    (done,) = complete(engine, requests_of(ids.tolist(), how, seed=0))
    assert done.tokens.tolist() == continued


@pytest.mark.slow
def test_samples_join_to_text_and_the_model_opens_in_transformers(tmp_path):
    run_dir = tmp_path / "run"
    run(run_dir, "--steps=1", "--batch_prompts=8", "--samples_per_prompt=2", "--max_new_tokens=12", "--lr=1e-3")
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    joined = [s["prompt"] + s["completion"] for s in samples]
    # The prompts end inside a sentence: a word, or a comma, is followed by a space far more often than by a letter.
    assert sum(bool(re.match(r"[ .,!?'\n]", s["completion"])) for s in samples) > len(samples) / 2
    assert not any("  " in text or "<" in text for text in joined)
    check_loads_in_transformers(run_dir / "model")


@pytest.mark.slow
@pytest.mark.gloo
def test_the_reward_rises_and_the_text_stays_near_the_models(tmp_path):
    run_dir = tmp_path / "run"
    rows = run(
        run_dir,
        "--mesh=dp2",
        "--steps=6",
        "--batch_prompts=16",
        "--samples_per_prompt=4",
        "--max_new_tokens=24",
        "--lr=1e-3",
        "--kl_coef=0.05",
    )
    rewards = [row["reward/mean"] for row in rows]
    assert rewards[0] < 0.2
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.15
    assert rows[-1]["actor/reward_kl_penalty"] < 1.0  # nats a token
    assert max(row["rollout/logprob_gap_max"] for row in rows) < 1e-4
