"""Flags of environments: how one is named, what bounds its episodes, and what does not go with it."""

import functools
import json
import os

import pytest
from selection import quick
from small_runs import GRPO, MEASURED, SMALL, Quiet, begin, gap, scored_batch

from funrl.algos.recipes.online_dpo import online_dpo
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.rewards.call import RewardError
from funrl.trainer import loop, phases, startup
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.jobs.row_source import episode_setup, open_rewards
from funrl.trainer.settings.checks import check_settings
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import settings_of
from funrl.trainer.steps.sync import sync

ENVIRONMENTS = '''
import os
import pathlib

from funrl.rollout.episodes import Episode

class Turns:
    """Says 5 after each reply, until a limit ends the episode."""
    agents = ("policy",)

    async def run(self, policy, example, seed):
        trajectory = policy.start(example.tokens)
        replies = 0
        try:
            while True:
                reply, last = await policy.sample(trajectory)
                replies += 1
                trajectory = policy.extend(last, [5])
        except Exception:
            return Episode([last], {"policy": float(replies)}, status="turns")

def count(messages, **fields):
    """Asks once more, then rewards."""
    return "1" if len(messages) < 3 else float(len(messages[-1]["content"]))

def made():
    return Turns()

class Half:
    def reset(self): ...

class Counted(Turns):
    """Turns with a reward of its own for each reply, and prompts of its own."""
    def __init__(self, worth, sums=20):
        self.worth, self.sums = worth, sums

    def prompts(self, seed):
        return [{"prompt": f"{n}+{seed}="} for n in range(self.sums)]

    async def run(self, policy, example, seed):
        episode = await super().run(policy, example, seed)
        return Episode(episode.ends, {"policy": self.worth * episode.rewards["policy"]}, status="turns")

class Noted(Turns):
    """Turns that leave the number of their process in a folder."""
    def __init__(self, folder):
        self.folder = folder

    async def run(self, policy, example, seed):
        (pathlib.Path(self.folder) / str(os.getpid())).touch()
        return await super().run(policy, example, seed)

class Together(Turns):
    scores_by_state = True
    async def score(self, episodes): ...

def add(left: int, right: int) -> int:
    """Add.

    Args:
        left: the first.
        right: the second.
    """
    return left + right

TOOLS = [add]
'''
TEMPLATE = "{% for m in messages %}={{ m['content'] }}-{% endfor %}{% if add_generation_prompt %}={% endif %}"


@pytest.fixture
def files(tmp_path):
    (tmp_path / "own.py").write_text(ENVIRONMENTS)
    lines = [json.dumps({"prompt": f"{n}+{n}="}) for n in range(20)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    return tmp_path


def job_of(files, name="Turns", **settings):
    given = {"prompts": str(files / "prompts.jsonl"), "env": f"{files / 'own.py'}:{name}", "samples_per_prompt": 3}
    return prepare(settings_of(**SMALL | given | settings), functools.partial(GRPO, kl_coef=0.0))


def metrics_of_step(job):
    run, state = startup.begin_run(job, single(), Quiet())
    state = sync(run.parts, state, frozen=run.frozen)
    return phases.draw_batch(run, state)[2]


@pytest.mark.parametrize("name", ["Turns", "made"])
def test_an_environment_of_a_file(files, name):
    metrics = metrics_of_step(job_of(files, name, episode_turns=3))
    assert metrics["episodes/turns"] == 3 and metrics["episodes/failed"] == 0


def test_a_function_of_messages_is_one(files):
    job = job_of(files, "count", chat_template=str(files / "chat.jinja"))
    assert metrics_of_step(job)["episodes/turns"] == 2


def test_a_list_of_tools_is_one(files):
    (files / "answers.jsonl").write_text("\n".join(json.dumps({"prompt": f"{n}+1=", "answer": "7"}) for n in range(20)))
    job = job_of(
        files,
        "TOOLS",
        chat_template=str(files / "chat.jinja"),
        tool_parser="hermes",
        prompts=str(files / "answers.jsonl"),
    )
    batch = scored_batch(*begin(job, single()))[0].batch
    assert set(batch.score.tolist()) <= {0.0, 1.0} and batch.score.shape == (12,)


@pytest.mark.parametrize("arguments", ["worth:0.5", '{"worth": 0.5, "sums": 30}'])
def test_arguments_and_prompts_of_an_environment(files, arguments):
    job = job_of(files, "Counted", env_args=arguments, prompts=None, episode_turns=3)
    assert (scored_batch(*begin(job, single()))[0].batch.score == 1.5).all()
    sums = 30 if "sums" in arguments else 20
    texts = [example.text for example in (*job.task.prompts, *job.task.heldout)]
    assert sorted(texts) == sorted(f"{n}+0=" for n in range(sums)) and job.warmstart_steps == 0


def test_flags_bound_the_episodes(files):
    flags = {
        "episode_turns": 4,
        "episode_tokens": 9,
        "env_timeout": 2.5,
        "episode_retries": 3,
        "max_waiting": 7,
    }
    of_chats = {"tool_parser": "glm", "tool_tokens": 5, "history": "template"}
    job = job_of(files, **flags, **of_chats)
    assert episode_setup(job, job.task.environment).chat.options == tuple(of_chats.values())
    limits = episode_setup(job, job.task.environment).limits
    assert (limits.turns, limits.tokens, limits.environment_s, limits.retries, limits.waiting) == tuple(flags.values())
    assert limits.length == job.model.config.max_positions
    assert metrics_of_step(job)["episodes/turns"] <= 4


@pytest.mark.slow
@pytest.mark.parametrize("mesh", quick(["dp1", "dp2"], ["dp1"]))
def test_workers_of_an_environment_change_no_bit(files, mesh):
    def program(m, pool):
        observer = Quiet()
        loop.train_loop(job, m, observer, pool=pool)
        return observer.steps, observer.params, os.getpid()

    runs = []
    for workers in (0, 2):
        pids = files / f"pids{workers}"
        pids.mkdir()
        flags = {"env_args": f"folder:{pids}", "episode_turns": 3, "env_workers": workers, "queue": "fixed"}
        job = job_of(files, "Noted", mesh=mesh, steps=1, **flags)
        steps, params, rank = launch(program, job.sizes, "cpu", before=functools.partial(open_rewards, job))
        result = {int(path.name) for path in pids.iterdir()}
        assert len(result) == max(1, workers) * (2 if mesh == "dp2" else 1) and (rank in result) == (workers == 0)
        measured = ("memory/", *MEASURED)
        runs.append(
            [{k: v for k, v in m.items() if not k.startswith(measured) and not k.endswith(measured)} for _, m in steps]
        )
        runs.append(params)
    assert runs[0] == runs[2]
    assert gap(runs[1], runs[3]) == 0


@pytest.mark.parametrize(
    "flags,message",
    [
        (
            {"env": "own.py:Turns", "env_workers": 2, "new_tokens_per_step": 8},
            "--env_workers=2 with --new_tokens_per_step=8: such episodes wait in the rank",
        ),
        (
            {"env": "own.py:Together", "env_workers": 2},
            "env_workers=2: the rewards of its groups need all",
        ),
        ({"env": "own.py:Missing"}, "Missing"),
        ({"env": "own.py:Half"}, "Half lacks step, close"),
        ({"env": "own.py:Turns", "prompts": None}, "needs --prompts=FILE.jsonl, whose records"),
        ({"env": "own.py:Counted"}, "class Counted needs worth; give --env_args=worth:VALUE"),
        ({"env": "own.py:Counted", "env_args": "worht:1"}, "'worht', only worth, sums; did you mean worth"),
        ({"env": "own.py:made", "env_args": "worth:1"}, r"made\(\) takes no argument 'worth', nor any other"),
        (
            {"env": "own.py:TOOLS", "env_args": "reward:math,format:1"},
            "takes no argument 'format', only reward, system",
        ),
        ({"env": "own.py:TOOLS", "env_args": "reward:absent"}, "env=.*own.py:TOOLS: --reward=absent"),
        ({"env": "own.py:Counted", "env_args": "{worth}"}, "write NAME:VALUE, separated by commas, or a JSON object"),
        ({"env": "own.py:Turns", "reward": "math"}, "the environment rewards its episodes"),
        (
            {"env": "own.py:Turns", "new_tokens_per_step": 8, "episode_turns": 2},
            "--new_tokens_per_step=8: a row has 8 new tokens at most",
        ),
        (
            {"env": "own.py:Turns", "kv_cache_gb": 1e-4, "episode_turns": 64},
            "the longest prompt and episode may have 64 tokens, .* or a smaller --episode_tokens",
        ),
        ({"env": "own.py:Turns", "on_reward_error": "zero"}, "--episode_retries"),
    ],
)
def test_what_cannot_work_is_refused(files, flags, message):
    flags = flags | {"env": str(files / flags["env"])}
    with pytest.raises(ValueError, match=message):
        prepare(settings_of(**SMALL | {"prompts": str(files / "prompts.jsonl")} | flags), GRPO)


def test_pairs_are_refused(files):
    flags = {"prompts": str(files / "prompts.jsonl"), "env": f"{files / 'own.py'}:Turns"}
    with pytest.raises(SettingsError, match="the algorithm compares two completions"):
        prepare(settings_of(**SMALL | flags), online_dpo)


def test_a_flag_without_an_environment_is_refused():
    with pytest.raises(SettingsError, match="--episode_turns=3 does nothing without an environment"):
        check_settings(settings_of(episode_turns=3))
    with pytest.raises(SettingsError, match="--env_args=a:1 does nothing without --env"):
        check_settings(settings_of(env_args="a:1", task="calculator"))
    with pytest.raises(SettingsError, match="--reward_weights=2 with --task=calculator"):
        check_settings(settings_of(task="calculator", reward_weights="2"))


def test_tools_without_a_known_form_of_calls_end_the_run(files):
    (files / "answers.jsonl").write_text("\n".join(json.dumps({"prompt": f"{n}+1=", "answer": "7"}) for n in range(20)))
    job = job_of(files, "TOOLS", chat_template=str(files / "chat.jinja"), prompts=str(files / "answers.jsonl"))
    with pytest.raises(RewardError, match="shows no known form of calls of tools; name it: --tool_parser=hermes"):
        metrics_of_step(job)
