"""A covering array of the ways in which rows are written: engines, placements, environments, rewards, filters.

A covering array has each pair of values in a run of two steps on tiny models. With --staleness=0 such a run has the
numbers of the one whose ranks train and generate by turns. A pair that no run has is refused, and docs/placement.md has
the list.

    PYTHONPATH=tests python tests/trainer/row_pairs.py   # writes the array and the list of refused pairs anew
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import random
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from picture_runs import TEMPLATE, save_seeing_model
from small_runs import SMALL, Quiet
from test_placement_runs import one_thread

from funrl.algos import chain, greedy_baseline
from funrl.algos.filters.by_group import unequal_scores
from funrl.algos.recipes.rollout_is import rollout_is
from funrl.data.pictures import picture_url
from funrl.data.tokenizer import character_tokenizer
from funrl.mesh.launch import launch
from funrl.models import decoder_config, decoder_model, with_value_head
from funrl.models.errors import ModelError
from funrl.models.huggingface import directories as hf
from funrl.rollout.episodes import Episode
from funrl.rollout.vllm.families import vllm_problem
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.placement.ranks import run_rank
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.scorers import Given
from funrl.trainer.settings.settings import settings_of

FACTORS = {
    "engine": ("native", "hf", "vllm"),
    "place": ("shared", "split", "ahead", "ray", "ray ahead"),
    "unit": ("completion", "tool", "agents"),
    "reward": ("function", "model", "judge"),
    "filter": (False, True),
    "baseline": (False, True),
    "parts": (False, True),
    "adapters": (False, True),
    "pictures": (False, True),
}
PLACES = {
    "shared": {},
    "split": {"place": "generate:1"},
    "ahead": {"place": "generate:1", "staleness": 2},
    "ray": {"place": "generate:ray2"},
    "ray ahead": {"place": "generate:ray2", "staleness": 2},
}
ENVIRONMENT_OF = {"vllm": "vllm", "ray": "ray", "ray ahead": "ray"}  # of values, whose rows run there alone
ALPHABET = "abcdefgh ?"
FILE = Path(__file__).with_name("row_pairs.json")  # the rows of the array
PAGE = Path(__file__).parents[2] / "docs" / "placement.md"
MARKS = "<!-- refused pairs -->\n", "<!-- end of refused pairs -->\n"
TERMS = {  # of values, for readers of the page
    ("engine", "hf"): "`--engine=hf`",
    ("engine", "vllm"): "`--engine=vllm`",
    ("place", "split"): "`--place`",
    ("place", "ahead"): "`--place` with `--staleness`",
    ("place", "ray"): "`generate:ray`",
    ("place", "ray ahead"): "`generate:ray` with `--staleness`",
    ("unit", "tool"): "an environment",
    ("unit", "agents"): "agents with models of their own",
    ("reward", "model"): "`--reward_model`",
    ("reward", "judge"): "`--judge`",
    ("parts", True): "`--new_tokens_per_step`",
    ("pictures", True): "pictures",
}


class ToolCall:
    """Two turns with a tool's tokens between them; the reward is of both replies."""

    agents = ("policy",)

    async def run(self, policy, example, seed):
        first, trajectory = await policy.sample(policy.start(example.tokens, owned=example.owned), max_tokens=3)
        await asyncio.sleep(0)
        second, trajectory = await policy.sample(policy.extend(trajectory, [5, 6]), max_tokens=3)
        return Episode([trajectory], {"policy": float(sum([*first.tokens, *second.tokens]) % 3)})


class TwoAgents:
    """The policy writes, and an earlier self of it, or a model of a directory, answers; each has its own reward."""

    agents = ("policy", "rival")

    async def run(self, policy, example, seed):
        own, mine = await policy.sample(policy.start(example.tokens, owned=example.owned), max_tokens=3)
        answer, theirs = await policy.sample(policy.start([4, 5, *own.tokens], agent="rival"), max_tokens=3)
        rewards = {"policy": float(sum(own.tokens) % 3), "rival": float(sum(answer.tokens) % 2)}
        return Episode([mine, theirs], rewards)


ENVIRONMENTS = {"completion": None, "tool": ToolCall, "agents": TwoAgents}


def write_files(folder):
    """Models of texts and of pictures, models that score, prompts of both kinds, and a reward function."""
    tokenizer = character_tokenizer(ALPHABET)
    sizes = {"embed": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head": 32, "mlp": 16}  # vLLM has no smaller heads
    config = decoder_config(**sizes, vocab=len(tokenizer), max_positions=256, eos=(1,), pad=0)
    decoder = decoder_model(config)
    hf.save(folder / "text", decoder, decoder.init(torch.Generator().manual_seed(0)), tokenizer)
    save_seeing_model(folder / "seeing", head=32)
    (folder / "seeing" / "chat_template.jinja").write_text(TEMPLATE)
    scorer = with_value_head(decoder)
    params = scorer.init(torch.Generator().manual_seed(3), torch.float64)
    params = {name: x if name == "decoder" else torch.full_like(x, 0.5) for name, x in params.items()}
    hf.save(folder / "model", scorer, params, tokenizer)
    hf.save(folder / "judge", decoder, decoder.init(torch.Generator().manual_seed(5)), tokenizer)
    (folder / "template.txt").write_text("{{prompt}}{{ completion }}")
    draw = np.random.default_rng(0)
    shapes = [[(8, 16)], [], [(24, 8), (8, 8)]]
    pictures = [[picture_url(draw.integers(0, 256, (*x, 3), dtype=np.uint8)) for x in row] for row in shapes * 8]
    seen = [{"prompt": "a cab ?", "images": x} for x in pictures]
    texts = [{"prompt": f"{ALPHABET[n % 8]} cab{ALPHABET[n // 8]}"} for n in range(24)]
    for name, records in (("seeing", seen), ("text", texts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "reward.py").write_text("def score(prompt, completion, **fields):\n    return len(set(completion)) % 3\n")
    return folder


def job_of(folder, ways):
    """The job of a row of the array. Raises: ValueError, where it is refused."""
    algorithm = rollout_is()
    pieces = [greedy_baseline(), algorithm.advantage] if ways["baseline"] else [algorithm.advantage]
    algorithm = dataclasses.replace(
        algorithm, advantage=chain(*pieces), filter=unequal_scores() if ways["filter"] else None
    )
    kind = "seeing" if ways["pictures"] else "text"
    flags = {"model": f"{folder}/{kind}", "prompts": f"{folder}/{kind}.jsonl", "engine": ways["engine"]}
    flags |= PLACES[ways["place"]]
    if ways["unit"] == "completion":
        flags |= {"reward": f"{folder}/reward.py:score", "reward_workers": 0}
    if ways["reward"] == "model":
        flags |= {"reward_model": f"{folder}/model"}
    if ways["reward"] == "judge":
        flags |= {"judge": f"{folder}/judge", "judge_template": f"{folder}/template.txt", "judge_pattern": "[a-h]"}
        flags |= {"judge_max_new_tokens": 8}
    if ways["unit"] == "agents":
        flags |= {"agents": "rival:frozen"}
    flags |= {"max_refills": 3} if ways["filter"] else {}
    flags |= {"new_tokens_per_step": 3} if ways["parts"] else {}
    flags |= {"lora_rank": 2} if ways["adapters"] else {}
    flags |= {"dtype": "float32"} if ways["engine"] != "native" else {}
    environment = ENVIRONMENTS[ways["unit"]]
    given = Given(environment=None if environment is None else environment())
    return prepare(settings_of(**SMALL | {"steps": 2, "max_new_tokens": 6} | flags), lambda: algorithm, given)


def check_model(model, device, dtype, tensor=1, cache_bytes=0):
    """`check_vllm` where vLLM is installed."""
    if problem := vllm_problem(model, device, dtype, tensor=tensor):
        raise ModelError(problem)


def refusal_of(folder, ways):
    """The message with which a row of the array is refused, where vLLM and Ray are installed; None: it is not."""
    installed = contextlib.ExitStack()
    installed.enter_context(mock.patch("funrl.trainer.jobs.engines.check_vllm", check_model))
    installed.enter_context(mock.patch.dict(sys.modules, {"ray": json}))  # any module
    try:
        with installed:
            job_of(folder, ways)
    except ValueError as error:
        assert isinstance(error, SettingsError), error
        return str(error)
    return None


def pairs_of(ways):
    """The pairs of values of a row."""
    return set(itertools.combinations(ways.items(), 2))


def all_pairs():
    """Each pair of values of two factors."""
    for (one, values), (other, others) in itertools.combinations(FACTORS.items(), 2):
        for value, further in itertools.product(values, others):
            yield (one, value), (other, further)


def alone(pair):
    """The row with a pair, and otherwise the first value of every factor."""
    return {name: values[0] for name, values in FACTORS.items()} | dict(pair)


def environment_of(ways):
    """What a row needs beside the packages of all other tests: "vllm", "ray" or "vllm and ray"; None: nothing."""
    return " and ".join(ENVIRONMENT_OF[value] for value in ways.values() if value in ENVIRONMENT_OF) or None


def covering_array(folder, seed=0):
    """Rows with every pair that is not refused alone, and the messages of the refused ones.

    Those of other environments come first, so that a row which runs everywhere has each pair that it can have.
    """
    draw = random.Random(seed)
    refused = {pair: message for pair in all_pairs() if (message := refusal_of(folder, alone(pair)))}
    left = [pair for pair in all_pairs() if pair not in refused]
    left.sort(key=lambda pair: environment_of(dict(pair)) is None)
    rows = []
    while left:
        row = max(candidates(draw, left[0], refused), key=lambda ways: len(pairs_of(ways).intersection(left)))
        if refusal_of(folder, row):  # three values together
            row = next(ways for ways in candidates(draw, left[0], refused) if refusal_of(folder, ways) is None)
        rows.append(row)
        left = [pair for pair in left if pair not in pairs_of(row)]
    return rows, refused


def candidates(draw, pair, refused):
    """Rows with a pair that run where it does, drawn at random and without refused pairs; last, that pair alone."""
    for _ in range(800):
        ways = {name: draw.choice(values) for name, values in FACTORS.items()} | dict(pair)
        if environment_of(ways) == environment_of(dict(pair)) and not pairs_of(ways) & refused.keys():
            yield ways
    yield alone(pair)


def rank_of(job, mesh):
    observer = Quiet()
    with one_thread():
        outcome = run_rank(job, mesh, observer)
    weights, observer.params = getattr(observer, "params", None), None
    return outcome, observer, weights


def run(job):
    return launch(functools.partial(rank_of, job), job.launched, "cpu")


def page_of(refused):
    """The table of refused pairs, with the reason of each as the run gives it."""
    lines = ["| not together | reason |", "|---|---|"]
    for pair, message in refused.items():
        reason = message.split(": ", 1)[1] if ": " in message else message
        lines.append(f"| {' and '.join(TERMS[value] for value in pair)} | {reason} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as path:
        rows, refused = covering_array(write_files(Path(path)))
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    before, rest = PAGE.read_text().split(MARKS[0])
    PAGE.write_text(before + MARKS[0] + page_of(refused).replace(path, "DIR") + MARKS[1] + rest.split(MARKS[1])[1])
