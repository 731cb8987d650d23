"""The display: aligned lines, which a terminal cuts at its width."""

import io

import pytest
from rich.console import Console

from funrl.track.progress import Progress, _duration
from funrl.track.records.samples import Sample

METRICS = {
    "reward/mean": 0.5,
    "actor/ppo_kl": 1.2e-3,
    "actor/entropy": 0.75,
    "actor/pg_clipfrac": 0.02,
    "response_length/mean": 6.5,
    "rollout/logprob_gap_max": 2e-6,
    "perf/tokens_per_s": 1234.0,
    "time_s/step": 2.0,
    "time_s/generate": 1.5,
    "time_s/update_policy": 0.5,
}


def plain(total=3, **options):
    file = io.StringIO()
    return file, Progress(total, Console(file=file, width=80), **options)


def test_plain_lines_are_aligned_and_complete():
    file, progress = plain(total=100)
    progress.update(1, METRICS)
    progress.update(100, METRICS | {"reward/mean": -12.5})
    header, first, last = file.getvalue().splitlines()
    assert header.split()[:4] == ["step", "reward", "KL", "entropy"]
    assert first.split()[:4] == ["1/100", "0.500", "1.2e-03", "0.750"]
    assert last.split()[:2] == ["100/100", "-12.500"]
    assert first.endswith("generate 75% update_policy 25%")  # no line is wrapped at the width of 80
    for heading, value in (("reward", "0.500"), ("KL", "1.2e-03"), ("tok/s", "1234")):
        assert header.index(heading) + len(heading) == first.index(value) + len(value)
    assert "\x1b" not in file.getvalue()


def test_time_left_counts_steps_and_not_the_start(monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("funrl.track.progress.time.monotonic", lambda: clock[0])
    file, progress = plain(total=31)
    clock[0] += 60  # weights are loaded, kernels compiled
    progress.update(1, METRICS | {"time_s/step": 2.0})
    clock[0] += 4
    progress.update(2, METRICS | {"time_s/step": 4.0})
    clock[0] += 50  # resumed in another process: step 9 is not the one after
    progress.update(9, METRICS | {"time_s/step": 5.0})
    lefts = [line.split("generate")[0].split()[-1] for line in file.getvalue().splitlines()[1:]]
    assert lefts == ["1m00s", "1m27s", "1m50s"]  # 30 x 2 s, 29 x 3 s, 22 x 5 s


def test_plain_header_comes_again_for_a_new_column_and_after_twenty_lines():
    file, progress = plain(total=50)
    for step in range(1, 24):
        progress.update(step, METRICS | ({"eval/accuracy": 0.875} if step == 2 else {}))
    lines = file.getvalue().splitlines()
    headers = [number for number, line in enumerate(lines) if line.split()[0] == "step"]
    assert headers == [0, 2, 23] and "accuracy" not in lines[0] and "accuracy" in lines[2]
    assert "0.875" in lines[3]


def test_supervised_runs_show_their_losses():
    row = {"train/loss": 0.6931, "preference/margin": 0.25, "perf/tokens_per_s": 99.0, "time_s/step": 0.5}
    file, progress = plain(total=2)
    progress.update(1, row | {"eval/loss": 0.7, "eval/accuracy": 0.5})
    progress.update(2, row | {"train/loss": 12.5})
    header, first, last = file.getvalue().splitlines()
    assert header.split()[:6] == ["step", "loss", "held", "out", "accuracy", "margin"]
    assert first.split()[:5] == ["1/2", "0.6931", "0.7000", "0.500", "0.250"]
    assert last.split()[:5] == ["2/2", "12.5000", "-", "-", "0.250"]


def test_samples_are_one_safe_line_and_not_too_many():
    file, progress = plain()
    progress.update(1, METRICS)
    for _ in range(5):
        progress.sample(Sample(1, "[bold]12+3=", "15\n[/b]\x1b[2J" + "x" * 1000, 1.0))
    samples = [line for line in file.getvalue().splitlines() if line.startswith("sample")]
    assert len(samples) == 1
    assert samples[0].startswith(r"sample step 1  reward 1  [bold]12+3= | 15\n[/b]\x1b[2Jxxx") and len(samples[0]) < 260
    file, progress = plain(sample_seconds=0)
    for reward in (0.0, float("nan")):
        progress.sample(Sample(0, "p", "c", reward))
    assert file.getvalue().count("sample") == 2


def test_an_episode_is_shown_from_its_begin_and_its_end():
    says = [{"role": "user", "text": f"words {n}"} | ({"sampled": True} if n % 2 else {}) for n in range(9)]
    conversation = {"branches": [{"agent": "policy", "reward": 1.0, "says": says}]}
    file, progress = plain(sample_seconds=0)
    progress.sample(Sample(2, "p", "c", 0.5, conversation=conversation))
    texts = ["words 0", "words 1", "words 2", "(3 more)", "words 6", "words 7", "words 8"]
    assert file.getvalue().strip() == "sample step 2  reward 0.5  " + " | ".join(texts)


def test_an_episode_without_a_reward_says_why():
    for status, word in (("failed", "failed"), ("cancelled", "failed"), ("turns", "unscored"), ("done", "unscored")):
        conversation = {"branches": [{"says": [{"text": "a", "sampled": True}]}], "status": status}
        file, progress = plain(sample_seconds=0)
        progress.sample(Sample(1, "p", "c", None, conversation=conversation))
        assert file.getvalue().strip() == f"sample step 1  {word}  a"
    assert Sample(1, "p", "c", None).missing == Sample(1, "p", "c", 0.0, conversation=conversation).missing == ""


def test_text_the_terminal_cannot_encode_is_written_out():
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    progress = Progress(1, Console(file=file))
    progress.sample(Sample(0, "caf\u00e9", "\u4f60", 1.0))
    progress.note("na\u00efve")
    assert rb"caf\xe9 | \u4f60" in raw.getvalue() and rb"na\xefve" in raw.getvalue()


@pytest.mark.parametrize("width", [20, 40, 60, 80])
def test_a_narrow_terminal_cuts_lines(width):
    file = io.StringIO()
    progress = Progress(3, Console(file=file, force_terminal=True, width=width, color_system=None))
    for step in range(1, 4):
        progress.update(step, METRICS | {"eval/accuracy": 0.5, "actor/kl_loss": 0.1})
    assert [len(line) <= width for line in file.getvalue().splitlines()] == [True] * 4 and "reward" in file.getvalue()


def test_numbers_that_are_not_finite_are_shown():
    file, progress = plain()
    for step in (1, 2, 3):
        progress.update(step, METRICS | {"reward/mean": float("nan"), "time_s/generate": float("nan")})
    assert "nan" in file.getvalue()


def test_remaining_time_follows_the_pace(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    file, progress = plain(total=63)
    for step in (1, 2, 3):
        now[0] += 2.0
        progress.update(step, METRICS)
    assert " 2m00s " in file.getvalue().splitlines()[-1]  # 60 steps of 2 s


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (3599, "59m59s"), (3600, "1h00m"), (7380, "2h03m")]
)
def test_durations_have_two_units_at_most(seconds, text):
    assert _duration(seconds) == text
