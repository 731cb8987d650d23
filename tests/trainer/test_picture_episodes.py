"""Episodes of several turns with pictures: what an environment shows is what the engine and the trainer see."""

import asyncio
import json

import numpy as np
import pytest
import torch
from picture_runs import TEMPLATE, picture_steps, save_seeing_model
from PIL import Image
from small_runs import GRPO, SMALL, Quiet, assert_same
from test_replay import replayed, unlike

from funrl.data.pictures import picture_url
from funrl.environments.adapters import message_environment, single_turn
from funrl.environments.chat import TemplateChat, UnseenPicturesError
from funrl.environments.logged import LoggedEnvironment
from funrl.environments.run import EpisodeLimits
from funrl.kinds import joined_lines
from funrl.mesh.launch import launch
from funrl.rollout.policy import Policy, PolicySetup
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.checkpoints.saved_episodes import read_episodes
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.loop import train_loop
from funrl.trainer.replay import replay
from funrl.trainer.settings.scorers import Given
from funrl.trainer.settings.settings import settings_of

pytestmark = pytest.mark.gloo
REWARD = "def score(prompt, completion, images, answer):\n    return len(completion) % 2\n"
CELL, CELLS, TURNS = 8, 4, 3  # pixels of a cell of a strip, at most, turns of an episode


class CountsSquares:
    """Shows a strip with white squares, asks how many there are, and shows another one; sometimes two, or none."""

    async def reset(self, example, seed):
        self.draw = np.random.default_rng(abs(seed))
        self.turn = 0
        return [{"role": "user", "content": example.text}, self.message()], ()

    def message(self):
        strips = [self.draw.integers(0, 2, self.draw.integers(1, CELLS + 1)) for _ in range(self.draw.integers(0, 3))]
        self.count = int(sum(strip.sum() for strip in strips))
        pixels = [np.repeat(np.repeat(255 * strip[None], CELL, 0), CELL, 1).astype(np.uint8) for strip in strips]
        parts = [{"type": "image", "image": Image.fromarray(strip)} for strip in pixels]
        return {"role": "user", "content": [*parts, {"type": "text", "text": "a cab ?"}]}

    async def step(self, message):
        self.turn += 1
        reward = float(str(message["content"]).count("abcdefgh"[self.count]))
        return [self.message()], reward, self.turn == TURNS

    async def close(self):
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("episodes")
    save_seeing_model(path / "model")
    (path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    prompts = [{"prompt": "abcdefgh"[i % 8], "images": [], "answer": "b"} for i in range(12)]
    (path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in prompts))
    return path


def job_of(folder, environment=None, **flags):
    environment = message_environment(CountsSquares) if environment is None else environment
    given = {"model": str(folder / "model"), "prompts": str(folder / "prompts.jsonl")} | flags
    return prepare(settings_of(**SMALL | given), GRPO, Given(environment=environment))


def steps_on(folder, steps=1, **flags):
    job = job_of(folder, **flags)
    return launch(picture_steps(job, steps), job.sizes, "cpu")


@pytest.fixture(scope="module")
def alone(folder):
    return steps_on(folder)


def test_the_trainer_sees_what_the_engine_saw_in_every_turn(alone):
    assert all(metrics["rollout/logprob_gap_max"] < 1e-12 for metrics in alone["metrics"])
    assert all(metrics["episodes/failed"] == 0 and metrics["episodes/turns"] == TURNS for metrics in alone["metrics"])
    assert max(alone["pictures"]) > 8


MESHES = {
    "tp2": {"mesh": "tp2"},
    "fsdp2": {"mesh": "dp2", "fsdp": True, "token_budget": 128},
    "in workers": {"env_workers": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_steps_are_those_of_one_process(folder, alone, mesh):
    assert_same(steps_on(folder, **MESHES[mesh]), alone, 1e-9)


@pytest.mark.slow
def test_forks_show_the_pictures_before_them_again(folder):
    steps = steps_on(folder, history="template")
    metrics = steps["metrics"][0]
    forks = {name: value for name, value in metrics.items() if name.startswith("episodes/forks/")}
    assert list(forks) == ["episodes/forks/truncated"] and len(steps["batches"][0].tokens) > 8
    assert metrics["rollout/logprob_gap_max"] < 1e-12


def test_a_prompt_with_pictures_is_an_episode_of_one_turn(folder, tmp_path):
    images = [[picture_url(np.full((8, 16, 3), 40 * n, dtype=np.uint8))] for n in range(3)]
    records = [
        {"prompt": "<image>a cab ?" if n % 2 else "a?", "images": images[n % 3], "answer": "b"} for n in range(8)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "reward.py").write_text(REWARD)
    reward = {"reward": f"{tmp_path / 'reward.py'}:score", "reward_workers": 0}
    plain = {"model": str(folder / "model"), "prompts": str(tmp_path / "prompts.jsonl")}
    job = prepare(settings_of(**SMALL | plain | reward), GRPO)
    row = launch(picture_steps(job, 1), job.sizes, "cpu")
    turns = job_of(folder, single_turn(job.task.rewards[0]), prompts=plain["prompts"])
    other = launch(picture_steps(turns, 1), turns.sizes, "cpu")
    assert row["pictures"] == other["pictures"]
    assert (row["batches"][0].tokens == other["batches"][0].tokens).all()
    assert torch.equal(row["batches"][0].rollout_logp, other["batches"][0].rollout_logp)
    assert torch.equal(row["batches"][0].score, other["batches"][0].score)


def policy_of(tokenizer, complete=None, seed=1):
    return Policy(complete, PolicySetup(Sampling(max_new_tokens=4), TemplateChat(tokenizer)), seed, EpisodeLimits())


def shown(*pictures, text="a"):
    parts = [{"type": "image", "image": picture} for picture in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def grey(value):
    return Image.new("RGB", (16, 8), (value,) * 3)


def test_pictures_are_tokens_of_the_messages_that_show_them(folder):
    tokenizer = job_of(folder).tokenizer
    policy = policy_of(tokenizer)
    placeholder = tokenizer.picture_form.tower.placeholder
    first = policy.start(shown(grey(5), grey(9)))
    longer = policy.extend(first, shown(grey(7)))
    assert first.token_ids().count(placeholder) == 4 and longer.token_ids().count(placeholder) == 6
    assert longer.leaf.owned.values["grids"].tolist() == [[2, 4]] * 3
    assert joined_lines([first.leaf.owned, policy.start(shown(grey(7))).leaf.owned]).digest == longer.leaf.owned.digest
    assert policy.start(shown()).leaf.owned is None


def test_the_noise_of_a_turn_depends_on_the_pictures_before_it(folder):
    tokenizer = job_of(folder).tokenizer
    seeds = []

    async def complete(request):
        seeds.append((tuple(request.prompt), request.seed, request.owned.digest))
        raise EOFError

    for value in (5, 9, 5):
        policy = policy_of(tokenizer, complete)
        policy.start(shown(text="b"))  # what an episode starts first has the seed of the episode
        with pytest.raises(EOFError):
            asyncio.run(policy.sample(policy.start(shown(grey(value)))))
    (tokens, first, _), (same, other, _), again = seeds
    assert tokens == same and first != other and again == seeds[0]


@pytest.mark.slow
def test_saved_episodes_are_replayed_and_generated_again_with_the_same_bits(folder, tmp_path):
    saved = {"save_rollouts": 1, "save_every": "1", "eval_every": 9, "steps": 1}
    job = job_of(folder, **saved)
    launch(lambda mesh: train_loop(job, mesh, Quiet(str(tmp_path / "checkpoints"))), job.sizes, "cpu")
    assert any(node.owned for logged in read_episodes(tmp_path / "rollouts", 1) for node in nodes_of(logged.episode))
    logged = LoggedEnvironment(("policy",))
    again = job_of(folder, logged, **saved)
    done = launch(lambda mesh: replay(again, tmp_path, None, mesh, Quiet(), logged), again.sizes, "cpu")
    assert [item.step for item in done] == [1] and unlike(done) == [] and logged.compared == 8 * TURNS
    assert unlike(replayed(tmp_path, job, None)) == []


def nodes_of(episode):
    return [node for end in episode.ends for node in end.nodes()]


WRONG = {
    "a placeholder of its own": ([12, 5], "1 places for pictures .* and 0 pictures"),
    "broken": (shown(b"no picture"), "the picture of 10 bytes cannot be read"),
    "absent": (shown("/no/such.png"), "the picture /no/such.png is not there"),
    "long": (shown(Image.new("RGB", (4000, 1))), "4000 x 1 pixels: one side is more than 200 times"),
    "without pixels": ([{"role": "user", "content": [{"type": "image"}]}], "1 places for pictures .* and 0 pictures"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_bad_picture_of_an_environment_is_refused_in_one_line(folder, case):
    messages, words = WRONG[case]
    policy = policy_of(job_of(folder).tokenizer)

    def extended(messages):
        return policy.extend(policy.start(shown()), messages)

    for start in (policy.start, extended):
        with pytest.raises(ValueError, match=words) as error:
            start(messages)
        assert "\n" not in str(error.value)


def test_pictures_for_a_model_of_text_or_a_template_without_places_end_the_run(folder):
    tokenizer = job_of(folder).tokenizer
    text = "m.content if m.content is string else m.content[-1].text"
    tokenizer.chat_template = f"{{% for m in messages %}}{{{{ {text} }}}}?{{% endfor %}}"
    with pytest.raises(UnseenPicturesError, match="the chat template has no place for the pictures of"):
        policy_of(tokenizer).start(shown(grey(5)))
    tokenizer.picture_form = None
    with pytest.raises(UnseenPicturesError, match="the model reads text only"):
        policy_of(tokenizer).start(shown(grey(5)))
