"""Continuations of held-out prompts: by an engine and by forward passes the same, on every mesh."""

import json

import pytest
import torch

from funrl.cli.run import main
from funrl.data.supervised import Text, TextExample
from funrl.mesh.mesh import single
from funrl.models import decoder_model, place
from funrl.rollout.engine import complete
from funrl.rollout.native.engine import native_engine
from funrl.rollout.requests import requests_of
from funrl.rollout.sampling_parameters import Sampling
from funrl.tasks import arithmetic
from funrl.trainer.jobs import text_samples
from funrl.trainer.jobs.text_samples import greedy_continuations, held_out_prompts


def test_they_are_what_an_engine_writes_greedily():
    model = decoder_model(arithmetic.model_config())
    params = model.init(torch.Generator().manual_seed(3))
    prompts = [[2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 3, 12]]
    engine = native_engine(model, single())
    engine.load(engine.weights.named(params), 0)
    (plain,) = complete(engine, requests_of(prompts[1:2], Sampling(greedy=True, max_new_tokens=3), 0))
    stop = (int(plain.written[2]),)
    how = Sampling(greedy=True, max_new_tokens=6, stop=stop)
    done = complete(engine, requests_of(prompts, how, 0))
    found = greedy_continuations(place(model), params, prompts, 6, stop, 0)
    assert found == [list(one.written) for one in done]
    assert len({len(one) for one in found}) > 1  # some ended


def test_a_prompt_is_what_comes_before_the_trained_tokens():
    tokenizer = arithmetic.tokenizer()

    def example(tokens, trained):
        return TextExample((Text(tokens, [i >= trained for i in range(len(tokens))]),))

    short, whole, long = example([3, 4, 5], 2), example([3, 4], 9), example([3] * 40, 30)
    found = held_out_prompts([short, whole, long], tokenizer, 20)
    assert [one.tokens for one in found] == [[3, 4]] and found[0].text == tokenizer.decode([3, 4])


@pytest.mark.slow
@pytest.mark.gloo
def test_a_supervised_run_writes_samples_alike_on_every_mesh(tmp_path):
    flags = ("--steps=3", "--batch_prompts=8", "--eval_prompts=9", "--eval_every=1", "--sample_every=2", "--device=cpu")
    for mesh, more in (("dp1", ()), ("dp2", ("--fsdp",))):
        assert (
            main("sft", ["sft", *flags, "--warmstart_steps=0", f"--mesh={mesh}", *more, f"--run_dir={tmp_path / mesh}"])
            == 0
        )
    one, two = (
        [json.loads(x) for x in (tmp_path / mesh / "samples.jsonl").read_text().splitlines()] for mesh in ("dp1", "dp2")
    )
    assert one == two and [row["step"] for row in one] == [0] * 8 + [2] * 8 + [3] * 8
    assert {row["prompt"] for row in one} == {p.prompt for p in arithmetic.heldout_prompts(9)[:8]}
    page = (tmp_path / "dp1/report.html").read_text()
    assert "At the end" in page and "the model writes the ones first" in page


def test_an_engine_writes_the_samples_of_preference_runs_where_its_weights_fit(tmp_path, monkeypatch):
    calls = []
    for name in ("engine_texts", "forward_texts"):
        original = getattr(text_samples, name)

        def counted(*arguments, name=name, original=original):
            calls.append(name)
            return original(*arguments)

        monkeypatch.setattr(text_samples, name, counted)
    flags = ("--steps=2", "--batch_prompts=4", "--eval_prompts=6", "--eval_every=1", "--warmstart_steps=0")
    for share, folder in ((text_samples.ENGINE_SHARE, "engine"), (0.0, "forward")):
        monkeypatch.setattr(text_samples, "ENGINE_SHARE", share)
        assert main("dpo", ["dpo", *flags, "--device=cpu", f"--run_dir={tmp_path / folder}"]) == 0
    assert calls == ["engine_texts"] * 2 + ["forward_texts"] * 2  # before the first step and after the last
    by_engine, by_passes = ((tmp_path / name / "samples.jsonl").read_text() for name in ("engine", "forward"))
    assert by_engine == by_passes and by_engine.count("\n") == 12
