"""Files of runs that were not run, and a reader of the pages about them."""

import math
from html.parser import HTMLParser

from funrl.track.records.run_directory import open_run
from funrl.track.records.samples import Sample, open_samples
from funrl.track.records.trackers import jsonl

VOID = {"meta", "link", "br", "img", "input"}


class Checker(HTMLParser):
    """Asserts that tags nest, and collects what a page refers to."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.text += data


def checked(page):
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    return checker


def a_run(path, steps=60, keep=lambda key: True, every=10):
    run = open_run(path, "ppo", {"mesh": "dp4,tp2", "seed": 3, "task": "addition", "steps": steps, "model": None})
    tracker, samples = jsonl(run.metrics), open_samples(run.samples)
    for step in range(steps + 1):
        row = {
            "reward/mean": step / steps,
            "actor/ppo_kl": 1e-3,
            "actor/entropy": 1 - step / 100,
            "actor/pg_clipfrac": 0.1,
            "actor/grad_norm": math.nan if step == 7 else 1.0,
            "critic/vf_loss": 0.5,
            "response_length/mean": 6.0,
            "rollout/logprob_gap_max": 10.0 ** -(step % 5 + 3),
            "perf/tokens_per_s": 2000.0 + step,
            "reward/digits/mean": 0.5,
            "reward/<b>/mean": 1.0,
            "time_s/step": 2.0,
            "time_s/generate": 1.0,
            "time_s/update_policy": 0.5,
        }
        if step % every == 0:
            row["eval/accuracy"] = 0.25 + 0.7 * step / steps
            samples.write(Sample(step, "<i>1+1=", f"{step}&", step / steps, (("digits", 0.5), ("<b>", 1.0))))
        tracker.write(step, {key: value for key, value in row.items() if keep(key)})
    tracker.close()
    samples.close()
    return run


def a_supervised_run(path, name, pairs):
    run = open_run(path, name, {"data": "some/where/mine.jsonl", "task": "arithmetic", "prompts": None, "steps": 20})
    tracker = jsonl(run.metrics)
    for step in range(1, 21):
        row = {"train/loss": 2.0 / step, "actor/grad_norm": 1.0, "time_s/step": 1.0}
        held = {"eval/loss": 3.0 / step}
        if pairs:
            row |= {f"preference/{key}": step / 10 for key in ("chosen", "rejected", "margin")}
            row["preference/accuracy"] = step / 20
            held |= {f"eval/{key}": step / 20 for key in ("accuracy", "chosen", "rejected", "margin")}
        else:
            row["actor/nll"] = held["eval/nll"] = 1.0
        tracker.write(step, row | (held if step in (1, 10, 20) else {}))
    tracker.close()
    return run
