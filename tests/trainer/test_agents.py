"""Agents that frozen models answer for: an earlier self of the policy, one that is renewed, a model of a directory."""

import functools

import pytest
import torch
from small_runs import (
    GRPO,
    SIZES,
    SMALL,
    Quiet,
    assert_same,
    begin,
    gap,
    one_step,
    remove_later_checkpoints,
    resized,
    steps_program,
    whole_weights,
)

import funrl
from funrl.environments.adapters import single_turn
from funrl.environments.agents import parse_agents, with_environment
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.models.huggingface import directories as hf
from funrl.rollout.episodes import Episode
from funrl.trainer import loop, phases
from funrl.trainer.checkpoints.checkpoint import complete_checkpoints, recorded
from funrl.trainer.gap import gap_problem
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.scorers import Given
from funrl.trainer.settings.settings import settings_of
from funrl.trainer.steps import learn
from funrl.trainer.storage.shard_server import CheckpointError


class Rivals:
    """Two agents write in turn after each other's tokens; each earns the share of its tokens that are odd."""

    agents = ("policy", "rival")

    async def run(self, policy, example, seed):
        mine = policy.start(example.tokens)
        theirs = policy.start(example.tokens, agent="rival")
        for _ in range(2):
            completion, mine = await policy.sample(mine, max_tokens=3)
            answer, theirs = await policy.sample(policy.extend(theirs, completion.tokens), max_tokens=3)
            mine = policy.extend(mine, answer.tokens)
        own = [node for node in mine.nodes() if node.sampled]
        rewards = {"policy": self.odd(own), "rival": self.odd(node for node in theirs.nodes() if node.sampled)}
        return Episode([mine, theirs], rewards)

    def odd(self, nodes):
        tokens = [token for node in nodes for token in node.tokens]
        return sum(token % 2 for token in tokens) / len(tokens)


def job_of(environment=None, **settings):
    given = Given(environment=environment or Rivals(), records=[{"prompt": f"{n}+{n}="} for n in range(24)])
    flags = SMALL | {"samples_per_prompt": 3, "agents": "rival:frozen"} | settings
    return resized(prepare(settings_of(**flags), functools.partial(GRPO, kl_coef=0.0), given), SIZES)


@functools.cache
def steps_of_mesh(mesh, agents, steps=3):
    job = job_of(agents=agents, mesh=mesh)
    return launch(steps_program(job, steps), job.sizes, "cpu")


@pytest.mark.gloo
@pytest.mark.slow
def test_agents_give_the_same_numbers_where_ranks_split_rows():
    steps, other = steps_of_mesh("sp2", "rival:frozen", 1), steps_of_mesh("dp1", "rival:frozen", 1)
    assert_same(steps, other, 1e-9)
    for metrics in other["metrics"]:
        assert metrics["episodes/turns"] == 2 and metrics["rollout/logprob_gap_max"] < 1e-10


@pytest.mark.slow
def test_a_few_steps_of_episodes_raise_the_reward():
    run, state = begin(job_of(batch_prompts=8, minibatches=1, lr=0.03), single())
    rewards = []
    for _ in range(6):
        state, metrics = one_step(run, state)
        rewards.append(metrics["reward/mean"])
    assert rewards[-1] > rewards[0] + 0.2, rewards


@pytest.mark.slow
def test_only_the_policys_turns_have_rows():
    for batch in steps_of_mesh("dp1", "rival:frozen")["batches"]:
        assert not batch.agent.any() and len(batch.score) == 12
        assert (batch.mask.sum(1) <= 6).all()


@pytest.mark.slow
def test_an_earlier_self_stays_or_is_renewed():
    kept, renewed, same = (
        steps_of_mesh("dp1", f"rival:{role}")["batches"] for role in ("frozen", "frozen:2", "policy")
    )
    for completion, other in zip(kept[:2], renewed[:2], strict=True):
        assert torch.equal(completion.tokens, other.tokens)  # both are the first weights
    assert not torch.equal(kept[2].tokens, renewed[2].tokens)
    assert same[0].agent.max() == 1


def test_an_environment_of_one_agent_has_no_other():
    with pytest.raises(ValueError, match="the environment has no agent 'rival'; its agents are policy"):
        with_environment(parse_agents("policy:policy,rival:frozen"), single_turn())


@pytest.mark.parametrize(
    "agents,message",
    [
        ("opponent:frozen", "the environment has no agent 'opponent'; its agents are policy, rival"),
        ("rival", "does not name an agent and its role; write NAME:policy, NAME:policy:ROLE"),
        ("rival:frozen,rival:policy", "agent rival is named twice"),
        ("rival:frozen:0", "'0' is no number of steps"),
        ("rival:frozen,policy:frozen", "no agent of policy, rival is the policy, so it does not learn"),
        ("rival:/no/such/model", "/no/such/model"),
    ],
)
def test_a_map_that_does_not_fit_is_refused_before_the_run(agents, message):
    with pytest.raises(ValueError, match=message):
        job_of(agents=agents)


def test_flags_that_do_not_go_with_frozen_agents_are_refused():
    with pytest.raises(SettingsError, match="--agents=a:frozen does nothing without an environment"):
        prepare(settings_of(**SMALL | {"agents": "a:frozen"}), GRPO)
    with pytest.raises(SettingsError, match="further models are served by --engine=native"):
        job_of(engine="hf", dtype="float32")


def test_agents_that_an_environment_does_not_name_are_those_of_the_map():
    agents = with_environment(parse_agents("left:policy,right:frozen:3,third:frozen:3"), object())
    assert agents.models == {"left": "", "right": "right", "third": "right"} and agents.trained == ("left",)
    assert list(agents.frozen) == ["right"]


class Typo(Rivals):
    """Starts an agent that it does not name."""

    async def run(self, policy, example, seed):
        await policy.sample(policy.start(example.tokens))
        await policy.sample(policy.start(example.tokens, agent="rvial"))


@pytest.mark.gloo
@pytest.mark.parametrize("mesh", ["dp1", pytest.param("tp2", marks=pytest.mark.slow)])
def test_an_agent_that_the_run_does_not_know_ends_it(mesh):
    job = job_of(Typo(), mesh=mesh, generate_mesh=mesh)

    def program(mesh):
        return loop.train_loop(job, mesh, Quiet())

    outcome = launch(program, job.sizes, "cpu")
    assert (
        "starts agent 'rvial', and the run knows policy:policy, rival:another model; name it in --agents"
        in outcome.error
    )


def trained(folder, **settings):
    """Train with checkpoints of every step; metrics by step, and the earlier self at the end."""
    job = job_of(save_every="1", keep_checkpoints=4, eval_every=1000, **settings)
    observer = Quiet(str(folder / "checkpoints"))
    loop.train_loop(job, single(), observer)
    return {step: metrics["actor/pg_loss"] for step, metrics in observer.steps}, recorded(last(folder)).arrays


def last(folder):
    return list(complete_checkpoints(folder / "checkpoints").values())[-1]


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [{}, {"lora_rank": 2}])
def test_a_run_that_goes_on_meets_the_same_earlier_self(tmp_path, adapters):
    settings = adapters | {"agents": "rival:frozen:2", "dtype": "float32"}
    whole, arrays = trained(tmp_path, steps=4, **settings)
    remove_later_checkpoints(tmp_path / "checkpoints", 3)  # the self is that of step 2, the policy of step 3
    rest, _ = trained(tmp_path, steps=4, resume=True, run_dir="x", **settings)
    assert rest == {4: whole[4]}
    names = [name for name in arrays if name.startswith("earlier/rival/")]
    assert "earlier/rival/step" in names and len(names) > 1
    assert all(("lora" in name) == bool(adapters) for name in names if "params" in name)


@pytest.mark.slow
def test_a_run_does_not_go_on_with_another_first_self(tmp_path):
    trained(tmp_path, steps=1)
    with pytest.raises(CheckpointError, match="began with other weights of its rival: --seed or the warm start"):
        trained(tmp_path, steps=2, seed=1, resume=True, run_dir="x")


class Told(Rivals):
    """Keeps the rival's answers."""

    def __init__(self):
        self.answers = []

    async def run(self, policy, example, seed):
        episode = await super().run(policy, example, seed)
        self.answers.append([node.tokens for node in episode.ends[1].nodes() if node.sampled])
        return episode


def answers_of(agents, **settings):
    environment = Told()
    run, state = begin(job_of(environment, agents=agents, **settings), single())
    phases.draw_batch(run, state)
    return environment.answers


def test_a_model_of_a_directory_answers(tmp_path):
    job = job_of(seed=3)
    params = job.model.init(torch.Generator().manual_seed(0), torch.float64)
    hf.save(tmp_path / "model", job.model, params, job.tokenizer)
    stored = answers_of(f"rival:{tmp_path / 'model'}")
    assert stored == answers_of("rival:frozen") != answers_of("rival:frozen", seed=3)


TWO = "rival:policy:second"


@pytest.mark.gloo
@pytest.mark.slow
def test_two_policies_give_the_same_numbers_on_two_ranks():
    steps, other = steps_of_job("dp2", TWO), steps_of_job("dp1", TWO)
    for ours, theirs in zip(steps["metrics"], other["metrics"], strict=True):
        kept = [name for name in theirs if not name.endswith(("environment_s", "recomputed_tokens"))]
        assert [ours[name] for name in kept] == pytest.approx([theirs[name] for name in kept], rel=1e-9, abs=1e-9)
    assert gap(steps["weights"], other["weights"]) < 1e-9
    assert {"actor/pg_loss", "second/loss", "actor/grad_norm", "second/grad_norm"} <= other["metrics"][0].keys()
    for metrics in other["metrics"]:
        assert metrics["rollout/logprob_gap_max"] < 1e-10, "each row is scored by the policy that wrote it"


@functools.cache
def steps_of_job(mesh, agents, environment=Rivals):
    """Metrics of two steps, and the weights of all policies after them."""
    job = job_of(environment(), agents=agents, mesh=mesh, minibatches=2)

    def program(mesh):
        trainer, state = begin(job, mesh)
        metrics = []
        for _ in range(2):
            trainer, state, record = loop.one_step(trainer, state, lambda run, state, stage: (run, state))
            metrics.append({name: x for name, x in record.metrics.items() if not name.startswith(("sync/", "perf/"))})
        return {"metrics": metrics, "weights": whole_weights(trainer, state)}

    return launch(program, job.sizes, "cpu")


class Alone(Rivals):
    """Neither agent hears the other."""

    async def run(self, policy, example, seed):
        ends = {agent: policy.start(example.tokens, agent=agent) for agent in self.agents}
        for agent in self.agents:
            _, ends[agent] = await policy.sample(ends[agent], max_tokens=4)
        return Episode(list(ends.values()), {agent: self.odd([end.leaf]) for agent, end in ends.items()})


class Single(Alone):
    """The same without the rival."""

    agents = ("policy",)


@pytest.mark.slow
def test_a_policy_learns_what_it_learns_without_the_second_one():
    two, steps = steps_of_job("dp1", TWO, Alone), steps_of_job("dp1", None, Single)
    assert gap(two["weights"]["policy"], steps["weights"]["policy"]) == 0
    assert gap(two["weights"]["second"], steps["weights"]["policy"]) > 1e-4
    for metrics, expected in zip(two["metrics"], steps["metrics"], strict=True):
        assert metrics["actor/pg_loss"] == expected["actor/pg_loss"] != metrics["second/loss"]


@pytest.mark.parametrize(
    "agents,message",
    [
        ("rival:policy:critic", "role 'critic' is declared already"),
        ("rival:policy:2nd", "'2nd' cannot name a second policy"),
        ("rival:policy:policy", "'policy' cannot name a second policy"),
        ("rival:policy:second,policy:policy:second", "no agent of policy, rival is the policy"),
    ],
)
def test_second_policies_that_cannot_be(agents, message):
    with pytest.raises(ValueError, match=message):
        job_of(agents=agents)


MASKS = {"top_p": 0.8, "temperature": 0.7, "mask_replay": True}


@pytest.mark.parametrize(("settings", "exact"), [({}, True), (MASKS, True), ({"lora_rank": 2}, False)])
def test_second_policies_have_no_gap_but_for_merged_adapters(settings, exact):
    trainer, state = begin(job_of(agents=TWO, on_gap="stop", dtype="float32", **settings), single())
    assert (gap_problem(trainer.job, trainer.parts) is None) == exact == (trainer.gap_check is not None)
    largest = 0.0
    for _ in range(2):
        trainer, state, record = loop.one_step(trainer, state, lambda run, state, stage: (run, state))
        largest = max(largest, record.metrics["rollout/logprob_gap_max"])
    assert (largest == 0) == exact and largest < 1e-5


def test_the_largest_gap_of_two_policies_is_reported(monkeypatch):
    """Learning is replaced: each policy reports a gap, and one that only it has."""
    gaps = {"policy": 0.5, "second": 0.25}

    def learned(roles, states, rows, plan, **options):
        (name,) = roles
        return states, {"rollout/logprob_gap_max": gaps[name], f"{roles[name].prefix}/grad_norm": 1.0}

    monkeypatch.setattr(learn, "learn", learned)
    trainer, state = begin(job_of(agents=TWO), single())
    _, _, record = loop.one_step(trainer, state, lambda run, state, stage: (run, state))
    assert record.metrics["rollout/logprob_gap_max"] == 0.5
    assert record.metrics["actor/grad_norm"] == record.metrics["second/grad_norm"] == 1.0


@pytest.mark.slow
def test_a_run_of_two_policies_goes_on(tmp_path):
    settings = {"agents": TWO, "dtype": "float32"}
    whole, arrays = trained(tmp_path, steps=2, **settings)
    remove_later_checkpoints(tmp_path / "checkpoints", 1)
    rest, _ = trained(tmp_path, steps=2, resume=True, run_dir="x", **settings)
    assert rest == {2: whole[2]}
    assert any(name.startswith("roles/second/opt_state/") for name in arrays)


def test_in_an_evaluation_the_model_answers_for_all_agents(tmp_path):
    job = job_of()
    params = job.model.init(torch.Generator().manual_seed(0), torch.float32)
    hf.save(tmp_path / "model", job.model, params, job.tokenizer)
    data = [{"prompt": f"{n}+{n}="} for n in range(4)]
    flags = {"data": data, "env": Alone, "samples": 2, "temperature": 1.0, "max_new_tokens": 4}
    metrics = [
        funrl.evaluate(str(tmp_path / "model"), agents=agents, **flags).metrics
        for agents in (None, "rival:frozen:3", TWO)
    ]
    assert metrics[0]["eval/episodes/failed"] == 0 and metrics[0]["eval/reward"] > 0
    assert len({metric["eval/reward"] for metric in metrics}) == 1  # of the policy, which does not hear the rival
