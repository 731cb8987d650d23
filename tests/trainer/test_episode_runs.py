"""Training on episodes of several turns and branches, on meshes; and the single turn, which is a run without them."""

import dataclasses
import functools

import pytest
import torch
from selection import quick
from small_runs import (
    GRPO,
    PPO,
    Quiet,
    assert_same,
    begin,
    digits_reward,
    scored_batch,
    small_job,
    steps_program,
)

from funrl import trees
from funrl.algos import (
    Algorithm,
    add,
    chain,
    clipped_surrogate,
    gae,
    geometric_mean,
    group_center,
    importance_weights,
    reduce,
    scale,
    sequence_mean,
    sequence_ratio,
    to_tokens,
    to_turns,
    turn_center,
    weighted,
)
from funrl.algos.losses.value_loss import clipped_value_loss
from funrl.algos.recipes import recipe
from funrl.algos.recipes.dapo import dapo
from funrl.environments.adapters import single_turn
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.rollout.episodes import Episode
from funrl.trainer import phases


class Branching:
    """Two turns of token ids, the second one twice, from the same first turn; a second agent in some episodes."""

    agents = ("policy", "other")

    async def run(self, policy, example, seed):
        start = policy.start(example.tokens)
        first, trajectory = await policy.sample(start, max_tokens=3)
        heard = policy.extend(trajectory, [5, 6])
        (left, item), (right, two) = await policy.sample(heard), await policy.sample(heard)
        ends, rewards = [item, two], {"policy": self.reward(first.tokens, left.tokens, right.tokens)}
        if len(first.tokens) > 1 and first.tokens[0] % 2:
            reply, path = await policy.sample(policy.start([7, *example.tokens], agent="other"), max_tokens=2)
            ends.append(path)
            rewards["other"] = self.reward(reply.tokens)
        if first.tokens[0] == 4:
            rewards["policy"] = None
        return Episode(ends, rewards, {trajectory.leaf: 0.25 * len(first.tokens)}, {"left": float(len(left.tokens))})

    def reward(self, *replies):
        return sum(sum(tokens) % 7 for tokens in replies) / 7


def turns():
    return Algorithm(
        advantage=chain(to_turns(0.9), turn_center()), losses={"policy": reduce(clipped_surrogate(), sequence_mean())}
    )


def sequences():
    """Everything that sums over whole episodes: weights and a ratio of sequences, and GMPO's mean."""
    chosen = chain(importance_weights("geometric", 0.9, 1.1), group_center(), to_tokens())
    term = add(weighted(clipped_surrogate(ratio=sequence_ratio())), scale(0.3, geometric_mean()))
    return Algorithm(advantage=chosen, losses={"policy": reduce(term, sequence_mean())})


RECIPES = {"grpo": functools.partial(GRPO, kl_coef=0.02), "ppo": PPO, "turns": turns, "sequences": sequences}
RECIPES |= {name: recipe(name) for name in ("gigpo", "mt_grpo", "rae", "echo")}


def episode_job(compose, environment, **settings):
    job = small_job(
        compose, reward=None, **{"samples_per_prompt": 3, "minibatches": 2, "task": "calculator", **settings}
    )
    task = job.task._replace(rewards=(), weights=(1.0,), environment=environment)
    return dataclasses.replace(job, task=task)


@functools.cache
def steps_of_mesh(name, mesh, steps=1):
    job = episode_job(RECIPES[name], Branching(), mesh=mesh)
    return launch(steps_program(job, steps), job.sizes, "cpu")


CASES = [  # ranks that share rows, or the tokens of a row, see parts of an episode
    *((name, "dp2") for name in ("grpo", "sequences", "gigpo", "mt_grpo", "rae")),
    *((name, "sp2") for name in ("ppo", "turns", "sequences", "echo")),
]


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("case", quick(CASES, [("grpo", "dp2")]), ids=" on ".join)
def test_episodes_give_the_same_numbers_on_every_mesh(case):
    name, mesh = case
    steps, other = steps_of_mesh(name, mesh), steps_of_mesh(name, "dp1")
    assert_same(steps, other, 1e-9)
    batch = other["batches"][0]
    assert batch.agent.max() == 1 and not batch.episode_first.all()
    for metrics in other["metrics"]:
        assert metrics["episodes/turns"] >= 3 and metrics["episodes/failed"] == 0
        assert metrics["rollout/logprob_gap_max"] < 1e-10


@pytest.mark.gloo
@pytest.mark.slow
def test_metrics_of_episodes_count_each_replica_once():
    job = episode_job(RECIPES["grpo"], Branching(), mesh="dp2", generate_mesh="tp2")
    metrics = launch(steps_program(job, 1), job.sizes, "cpu")["metrics"]
    for mine, other in zip(metrics, steps_of_mesh("grpo", "dp1")["metrics"], strict=True):
        for name in ("turns", "tokens", "context_tokens"):
            assert mine[f"episodes/{name}"] == other[f"episodes/{name}"]


def shown_program(job):
    """What a step shows of its episodes, on each rank."""

    def program(mesh):
        show = Quiet()
        run, state = begin(job, mesh, show)
        scored_batch(run, state)
        return show.conversations

    return program


@pytest.mark.slow
@pytest.mark.gloo
def test_the_first_episode_of_each_prompt_is_shown_as_a_conversation_wherever_it_ran():
    shown = []
    for mesh in ("dp1", "dp2"):
        job = episode_job(RECIPES["grpo"], Branching(), mesh=mesh)
        shown.append(launch(shown_program(job), job.sizes, "cpu"))
    assert shown[0] == shown[1]
    ((first, *others),) = shown[0]
    assert others and [branch["agent"] for branch in first["branches"][:2]] == ["policy", "policy"]
    context, turn, _, last = first["branches"][0]["says"]
    assert context["role"] == "context" and turn["sampled"] and turn["reward"] > 0 and last["sampled"]
    assert [entry.get("before") for entry in first["branches"][1]["says"]] == [True, True, True, None]


@pytest.mark.slow
def test_the_size_of_micro_batches_does_not_matter_to_sums_over_episodes():
    """Rows of an episode are in one micro-batch, however small it is to be."""
    jobs = [episode_job(sequences, Branching(), token_budget=budget) for budget in (16, 4096)]
    first, other = (launch(steps_program(job, 1), job.sizes, "cpu") for job in jobs)
    assert_same(first, other, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "sequences"])
def test_a_single_turn_is_a_run_without_environment_to_the_bit(name):
    job = small_job(RECIPES[name], samples_per_prompt=3, minibatches=2)
    plain = launch(steps_program(job, 2), job.sizes, "cpu")
    job = episode_job(RECIPES[name], single_turn(digits_reward), task="arithmetic")
    episodes = launch(steps_program(job, 2), job.sizes, "cpu")
    for before, after in zip(plain["batches"], episodes["batches"], strict=True):
        for field in before.names():
            if field != "scores":  # 0 columns of a run without reward functions
                assert all(map(torch.equal, trees.leaves(before.get(field)), trees.leaves(after.get(field)))), field
    for before, after in zip(plain["metrics"], episodes["metrics"], strict=True):
        assert before.items() <= after.items()
    for (name, x), (_, y) in zip(trees.named(plain["weights"]), trees.named(episodes["weights"]), strict=True):
        assert torch.equal(x, y), name


class Fails:
    """Raises in one group."""

    async def run(self, policy, example, seed):
        _, trajectory = await policy.sample(policy.start(example.tokens))
        if sum(example.tokens) % 3 == 0:
            raise RuntimeError("no such place")
        return Episode([trajectory], {"policy": float(trajectory.leaf.tokens[0])})


def test_a_failed_group_is_left_out_and_counted():
    job = episode_job(RECIPES["grpo"], Fails(), batch_prompts=8)
    done = launch(steps_program(job, 1), job.sizes, "cpu")
    batch, metrics = done["batches"][0], done["metrics"][0]
    failed = sum(sum(e.tokens) % 3 == 0 for e in job.task.prompts) / len(job.task.prompts)
    assert 0 < metrics["episodes/failed"] < 2 * failed
    assert len(batch.score) == 24 - 24 * metrics["episodes/failed"]


def test_a_failed_episode_is_shown_without_a_score():
    job = episode_job(RECIPES["grpo"], Fails(), batch_prompts=8)

    def program(mesh):
        show = Quiet()
        run, state = begin(job, mesh, show)
        scored_batch(run, state)
        return show.shown[0][3], show.conversations[0]

    scores, conversations = launch(program, job.sizes, "cpu")
    failed = [conversation.get("status") == "failed" for conversation in conversations]
    assert any(failed) and not all(failed) and [score is None for score in scores] == failed


class Breaks:
    """Gives equal rewards in the first four groups of three, and raises in all later ones."""

    def __init__(self):
        self.groups = set()

    async def run(self, policy, example, seed):
        _, trajectory = await policy.sample(policy.start(example.tokens))
        self.groups.add(example.text)
        if len(self.groups) > 4:
            raise RuntimeError("no such place")
        return Episode([trajectory], {"policy": 1.0})


def test_a_step_without_useful_rows_is_skipped_though_its_last_refill_failed():
    job = episode_job(dapo, Breaks(), batch_prompts=4, max_refills=2)
    run, state = begin(job, single())
    _, _, metrics = phases.draw_batch(run, state)
    assert metrics["filter_groups/skipped"] == 1 and metrics["episodes/failed"] == 0.5


def test_value_functions_see_single_rows():
    """A critic learns from rows of episodes: its target is that of the row's own tokens."""
    compose = lambda: Algorithm(  # noqa: E731
        advantage=chain(to_turns(), gae(gae_lambda=0.9)),
        losses={
            "policy": reduce(clipped_surrogate(), sequence_mean()),
            "critic": reduce(clipped_value_loss(), sequence_mean()),
        },
    )
    job = episode_job(compose, Branching())
    batch = launch(steps_program(job, 1), job.sizes, "cpu")["batches"][0]
    assert torch.isfinite(batch.returns).all() and (batch.returns[~batch.mask] == 0).all()
