"""Continuations of held-out prompts by an engine, the same on every mesh."""

import json

import pytest

from funrl.cli.run import main
from funrl.data.supervised import Text, TextExample
from funrl.tasks import arithmetic
from funrl.trainer.jobs import text_samples
from funrl.trainer.jobs.text_samples import held_out_prompts


def test_a_prompt_is_what_comes_before_the_trained_tokens():
    tokenizer = arithmetic.tokenizer()

    def example(tokens, trained):
        return TextExample((Text(tokens, [i >= trained for i in range(len(tokens))]),))

    short, whole, long = example([3, 4, 5], 2), example([3, 4], 9), example([3] * 40, 30)
    result = held_out_prompts([short, whole, long], tokenizer, 20)
    assert [completion.tokens for completion in result] == [[3, 4]] and result[0].text == tokenizer.decode([3, 4])


@pytest.mark.slow
@pytest.mark.gloo
def test_a_supervised_run_writes_samples_alike_on_every_mesh(tmp_path):
    flags = ("--steps=3", "--batch_prompts=8", "--eval_prompts=9", "--eval_every=1", "--sample_every=2", "--device=cpu")
    for mesh, more in (("dp1", ()), ("dp2", ("--fsdp",))):
        assert (
            main("sft", ["sft", *flags, "--warmstart_steps=0", f"--mesh={mesh}", *more, f"--run_dir={tmp_path / mesh}"])
            == 0
        )
    first, two = (
        [json.loads(x) for x in (tmp_path / mesh / "samples.jsonl").read_text().splitlines()] for mesh in ("dp1", "dp2")
    )
    assert first == two and [row["step"] for row in first] == [0] * 8 + [2] * 8 + [3] * 8
    assert {row["prompt"] for row in first} == {p.prompt for p in arithmetic.heldout_prompts(9)[:8]}
    assert "At the end" in (tmp_path / "dp1/report.html").read_text()


def test_a_run_whose_engine_would_not_fit_says_that_it_has_no_samples(tmp_path, monkeypatch, capsys):
    flags = ("--steps=2", "--batch_prompts=4", "--eval_prompts=6", "--eval_every=1", "--warmstart_steps=0")
    for share, folder, lines in ((text_samples.ENGINE_SHARE, "engine", 12), (0.0, "none", 0)):
        monkeypatch.setattr(text_samples, "ENGINE_SHARE", share)
        assert main("dpo", ["dpo", *flags, "--device=cpu", f"--run_dir={tmp_path / folder}"]) == 0
        assert ("no samples: an engine's weights" in capsys.readouterr().out) == (lines == 0)
        file = tmp_path / folder / "samples.jsonl"
        assert (file.read_text().count("\n") if file.exists() else 0) == lines
