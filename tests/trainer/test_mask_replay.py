"""The tokens that an engine could have sampled: recorded, moved with rows, and the trainer's distribution."""

import functools
import json
from unittest import mock

import pytest
import torch
from selection import quick
from small_runs import GRPO, PPO, SIZES, assert_same, begin, run_steps, scored_batch, small_job, steps_program
from test_checkpoint import assert_equal_steps, run_to_resume
from test_checkpoint import run as run_in_folder
from test_episode_runs import Branching, episode_job
from test_placement_runs import assert_same_runs, one_thread, rank_of
from test_placement_runs import run as run_placed

from funrl import trees
from funrl.algos.recipes.chord import chord
from funrl.algos.recipes.dapo import dapo
from funrl.algos.recipes.prime import prime
from funrl.algos.recipes.rollout_is import rollout_is
from funrl.compiled_kernels.kernel_library import library_problem
from funrl.compiled_kernels.truncated_scores import KeptTokens
from funrl.data.prompts import prompt_batch
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.models.decoder.routing import Experts
from funrl.rollout.engine import complete, onload_engine
from funrl.rollout.episode_records import record_from_json, to_json
from funrl.rollout.episode_replay import completion_of
from funrl.rollout.episodes import Episode, Node, Trajectory, from_record, to_record
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.requests import Request
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer import phases
from funrl.trainer.checkpoints.checkpoint import Recorded
from funrl.trainer.checkpoints.resumable import check_facts
from funrl.trainer.gap import GAP_METRIC
from funrl.trainer.phases import draw_batch
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.steps.sync import sync
from funrl.trainer.storage.shard_server import Array, CheckpointError

WAYS = (
    {"top_p": 0.9},
    {"top_k": 5, "temperature": 0.7},
    {"top_p": 0.8, "min_p": 0.3, "temperature": 1.3},
    {"min_p": 0.9, "temperature": 0.6, "speculate": 2},
)


def masks_of(batch):
    """The kept ids of each token on the mask, by (row, position)."""
    counts = batch.kept_counts.flatten().tolist()
    width = batch.kept_counts.shape[1]
    lines = batch.kept.values.split(counts)
    return {divmod(i, width): line.tolist() for i, line in enumerate(lines) if counts[i]}


def kept_of(logits_V, how):
    """The ids that truncation keeps, by sorting."""
    prob = (logits_V / how.get("temperature", 1.0)).softmax(-1)
    order = sorted(range(len(prob)), key=lambda v: (-prob[v].item(), v))
    order = order[: how.get("top_k") or len(order)]
    total = sum(prob[v].item() for v in order)
    kept = []
    mass = 0.0
    for v in order:
        if mass >= how.get("top_p", 1.0) * total or prob[v] < how.get("min_p", 0.0) * prob[order[0]]:
            break
        kept.append(v)
        mass += prob[v].item()
    return sorted(kept)


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_rows_have_the_tokens_that_could_be_sampled_and_the_log_probabilities_among_them(how):
    job = small_job(GRPO, mask_replay=True, max_new_tokens=8, **how)
    trainer, state = begin(job, single())
    check_truncated(trainer, state, draw_batch(trainer, state)[0].batch, how)


def check_truncated(trainer, state, batch, how, earlier=None):
    """Masks, log-probabilities and entropies are those of a loop over the trained tokens.

    Args:
      earlier: weights by version, of rows that several have sampled; None: those of the state have sampled all.
    """
    role = trainer.parts.roles["policy"]
    params = state.roles["policy"].params
    masks = masks_of(batch)
    places = batch.mask.nonzero().tolist()
    assert set(masks) == {tuple(place) for place in places} and len(masks) > 20
    logits_NV = role.placed.logits(params, batch)
    sampled_NV = logits_NV.clone()
    for version, weights in (earlier or {}).items():
        own_N = batch.version[batch.mask] == version
        sampled_NV[own_N] = role.placed.logits(weights, batch)[own_N]
    scores = role.placed.token_scores(params, batch, ("logp", "entropy"), role.temperature)
    for (row, position), logits_V, sampled_V in zip(places, logits_NV, sampled_NV, strict=True):
        expected = kept_of(sampled_V, how)
        assert masks[row, position] == expected
        logp_K, sampled_K = ((x / how.get("temperature", 1.0))[expected].log_softmax(-1) for x in (logits_V, sampled_V))
        token = expected.index(int(batch.tokens[row, position]))
        assert batch.rollout_logp[row, position].item() == pytest.approx(sampled_K[token].item(), abs=1e-9)
        assert scores.logp[row, position].item() == pytest.approx(logp_K[token].item(), abs=1e-9)
        entropy = -(logp_K.exp() * logp_K).sum().item()
        assert scores.entropy[row, position].item() == pytest.approx(entropy, abs=1e-9)


IN_EPISODES = {"top_p": 0.8, "temperature": 0.7, "mask_replay": True}


def test_turns_of_episodes_have_the_tokens_that_could_be_sampled():
    job = episode_job(GRPO, Branching(), on_gap="stop", **IN_EPISODES)
    trainer, state = begin(job, single())
    rows, _, metrics = scored_batch(trainer, state)
    assert metrics["episodes/turns"] >= 3 and metrics[GAP_METRIC] == 0
    check_truncated(trainer, state, rows.batch, IN_EPISODES)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("mesh", ["dp2", "sp2"])
def test_episodes_replay_the_same_on_every_mesh(mesh):
    def steps(mesh):
        job = episode_job(WITH_KL, Branching(), mesh=mesh, **IN_EPISODES)
        return launch(steps_program(job, 1), job.sizes, "cpu")

    assert_same(steps(mesh), steps("dp1"), 1e-9)


def test_an_episode_in_a_file_has_the_tokens_that_could_be_sampled():
    kept = KeptTokens(torch.tensor([4, 7, 2], dtype=torch.int32), torch.tensor([2, 1]))
    logp, versions = torch.zeros(2), torch.ones(2, dtype=torch.int64)
    root = Node(None, [1, 2], sampled=False)
    leaf = Node(root, [7, 2], sampled=True, raw_logp=logp, sampling_logp=logp, versions=versions, kept=kept)
    episode = Episode([Trajectory("policy", leaf)], {"policy": 1.0})
    again = from_record(record_from_json(json.loads(to_json(to_record(episode))))).ends[0].leaf
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(again.kept, kept, strict=True))
    assert completion_of(again).kept is again.kept and again.parent.kept is None


@pytest.mark.skipif(library_problem() is not None, reason=str(library_problem()))
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("how", WAYS, ids=str)
def test_the_gap_is_0(how, dtype):
    job = small_job(PPO, mask_replay=True, on_gap="stop", max_new_tokens=12, token_budget=64, dtype=dtype, **how)
    trainer, state = begin(job, single())
    rows, _, metrics = scored_batch(trainer, state)
    assert rows.batch.mask.sum() > 20 and metrics[GAP_METRIC] == metrics["rollout/logprob_gap_mean"] == 0
    assert (rows.batch.old_logp[rows.batch.mask] <= 0).all()


def test_preempted_completions_have_the_tokens_of_whole_ones():
    job = small_job(GRPO, top_p=0.8, mask_replay=True)
    _, state = begin(job, single())
    model = job.model
    page = model.page_bytes(single(), 16, torch.float64)
    sampling = Sampling(top_p=0.8, max_new_tokens=40)
    requests = [Request(n, [1 + n, 2, 3], sampling, seed=n) for n in range(6)]
    results = []
    for pages in (100, 6):
        options = NativeOptions(cache_bytes=pages * page, packed=False, record_kept=True)
        engine = native_engine(model, single(), torch.float64, options)
        engine.load(trees.named(state.roles["policy"].params), 1)
        engine.submit(requests)
        done = []
        while engine.unfinished():
            done += engine.step()
        results.append({x.number: x for x in done})
    for number, whole in results[0].items():
        other = results[1][number]
        assert torch.equal(whole.tokens, other.tokens) and len(whole.kept.counts_N) == len(whole.tokens) == 40
        assert all(torch.equal(a, b) for a, b in zip(whole.kept, other.kept, strict=True))


WITH_KL = functools.partial(GRPO, kl_coef=0.1)
REPLAYED = {"compose": WITH_KL, "top_p": 0.8, "temperature": 0.7, "mask_replay": True}


@functools.cache
def on_one_rank():
    return run_steps(2, **REPLAYED)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(
    "mesh",
    [
        {"mesh": "dp2", "fsdp": True},
        {"mesh": "tp2"},
        {"mesh": "dp2,tp2", "generate_mesh": "tp4"},
        {"mesh": "dp4", "generate_mesh": "dp2,tp2"},
        {"mesh": "sp2"},
        {"mesh": "sp2,tp2", "split_residual": "on"},
        {"mesh": "dp2,sp2", "fsdp": True},
        {"mesh": "sp4"},
    ],
    ids=str,
)
def test_every_mesh_replays_the_same(mesh):
    steps = run_steps(2, **REPLAYED, **mesh)
    assert_same(steps, on_one_rank(), 1e-9)
    assert all(metrics[GAP_METRIC] == 0 for metrics in steps["metrics"])


OF_EXPERTS = REPLAYED | {"task": "arithmetic_moe", "token_budget": 48}
OF_EXPERTS |= {"sizes": SIZES | {"experts": Experts(count=4, per_token=2, mlp=8, dense=(0,))}}


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(
    "mesh",
    [
        {"mesh": "ep2", "generate_mesh": "dp2"},
        {"mesh": "ep2,sp2", "fsdp": True},
        {"mesh": "ep2", "generate_mesh": "ep2"},
        {"mesh": "dp2,ep2", "generate_mesh": "ep2,tp2"},
        {"mesh": "ep4", "generate_mesh": "ep4", "queue": "fixed"},
    ],
    ids=str,
)
def test_experts_replay_the_same_on_every_mesh(mesh):
    alone = run_steps(1, **OF_EXPERTS)
    steps = run_steps(1, **OF_EXPERTS, **mesh)
    assert_same(steps, alone, 1e-9)
    assert [run["metrics"][0][GAP_METRIC] for run in (alone, steps)] == [0, 0]


APART = {
    "ppo": (PPO, {"place": "generate:1"}, {"epochs": 2}, 0.0),
    "several ranks": (WITH_KL, {"place": "train:dp2@0,3 generate:tp2@1-2", "fsdp": True}, {}, 1e-9),
    "refills": (dapo, {"place": "generate:2"}, {"steps": 3, "minibatches": 1, "max_new_tokens": 12}, 0.0),
    "experts": (
        WITH_KL,
        {"place": "train:dp1 generate:ep2"},
        {"task": "arithmetic_moe", "sizes": OF_EXPERTS["sizes"]},
        1e-9,
    ),
}


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("name", quick(APART, ["ppo"]))
def test_generators_apart_give_the_masks_of_ranks_that_do_both(name):
    compose, place, settings, tolerance = APART[name]
    settings = {**REPLAYED, **settings, "compose": compose}
    apart, together = (run_placed.__wrapped__(**settings, **where) for where in (place, {}))
    assert_same_runs(apart, together, tolerance)
    assert all(metrics[GAP_METRIC] == 0 for _, metrics in apart.observer.steps)


@pytest.mark.slow
@pytest.mark.gloo
def test_episodes_apart_have_the_masks_of_ranks_that_do_both():
    settings = {"steps": 2, **IN_EPISODES}
    apart = episode_job(WITH_KL, Branching(), place="generate:2", **settings)
    ended = launch(functools.partial(rank_of, apart), apart.launched, "cpu")
    assert_same_runs(ended, rank_of(episode_job(WITH_KL, Branching(), **settings), single()), 1e-9)
    assert all(metrics[GAP_METRIC] == 0 for _, metrics in ended.observer.steps)


def checked_rank(job, mesh):
    """The end of a rank; a trainer checks the rows of each step against the weights of all steps before it."""
    weights = {}
    draw = phases.draw_batch

    def draw_checked(trainer, state):
        weights[state.version] = trees.clone(state.roles["policy"].params)
        rows, after, metrics = draw(trainer, state)
        check_truncated(trainer, state, rows.batch, REPLAYED, weights)
        return rows, after, metrics

    with mock.patch.object(phases, "draw_batch", draw_checked), one_thread():
        return rank_of(job, mesh)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("how", [{"staleness": 2}, {"staleness": 1, "window": 6}], ids=str)
def test_older_rows_have_the_masks_of_the_weights_that_sampled_them(how):
    ahead = {"compose": rollout_is, "place": "generate:1", "minibatches": 1, "steps": 4, "max_new_tokens": 12}
    job = small_job(**REPLAYED | ahead | how)
    ended = launch(functools.partial(checked_rank, job), job.launched, "cpu")
    assert ended.outcome.error is None and len(ended.observer.steps) == 4
    assert all(metrics[GAP_METRIC] == 0 for _, metrics in ended.observer.steps)
    assert max(metrics["age/max"] for _, metrics in ended.observer.steps) > 0


IN_PARTS = REPLAYED | {"max_new_tokens": 12, "new_tokens_per_step": 3, "batch_prompts": 3, "minibatches": 1}


def test_completions_of_several_steps_have_the_masks_of_the_weights_that_sampled_them():
    trainer, state = begin(small_job(**IN_PARTS), single())
    weights = {}
    mixed = 0
    for _ in range(3):
        weights[state.version] = trees.clone(state.roles["policy"].params)
        rows, after, metrics = scored_batch(trainer, state)
        check_truncated(trainer, state, rows.batch, IN_PARTS, weights)
        mixed += metrics["partial/staleness_max"] > 0
        after, learned = phases.learn_batch(trainer, after, rows)
        assert learned[GAP_METRIC] == 0
        state = sync(trainer.parts, after)
    assert mixed


def test_in_parts_a_completion_has_the_masks_of_a_whole_one():
    job = small_job(**IN_PARTS)
    trainer, state = begin(job, single())
    _, state, _ = draw_batch(trainer, state)
    seeds = {group.place: group.seeds for group in state.source["begun"].groups}
    parts = {}
    for _ in range(6):
        rows, state, _ = draw_batch(trainer, state)
        for tokens, (row, masks) in zip(rows.batch.tokens.tolist(), of_rows(rows.batch), strict=True):
            length = int(rows.batch.length[row])
            parts[tuple(tokens[:length])] = masks, rows.batch.rollout_logp[row][rows.batch.mask[row]]
    engine = trainer.parts.generator.engine
    compared = 0
    with onload_engine(engine):
        for place, own in seeds.items():
            (prompt,) = prompt_batch(job.task.prompts, 1, 0, place)
            for whole in complete(
                engine, [Request(n, prompt.tokens, job.sampling, seed) for n, seed in enumerate(own)]
            ):
                masks, logp = parts[(*prompt.tokens, *whole.tokens.tolist())]
                assert masks == [x.tolist() for x in whole.kept.ids_M.split(whole.kept.counts_N.tolist())]
                assert torch.equal(logp, whole.sampling_logp.to(logp.dtype))
                compared += len(masks) > 3
    assert compared > 3


def of_rows(batch):
    """Each row with the masks of its sampled tokens, in order."""
    masks = masks_of(batch)
    return [(row, [masks[row, at] for at in x.nonzero().flatten().tolist()]) for row, x in enumerate(batch.mask)]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp1", pytest.param("dp2", marks=pytest.mark.gloo)])
def test_masks_of_begun_completions_are_in_checkpoints(mesh, tmp_path):
    settings = IN_PARTS | {"top_p": 0.8}
    _, steps, _, weights = run_to_resume(tmp_path, mesh, **settings)
    _, resumed, _, ends = run_in_folder(tmp_path, mesh, resume=True, run_dir="x", **settings)
    assert_equal_steps(resumed, steps[1:])
    assert all(map(torch.equal, ends, weights))
    assert max(metrics["partial/staleness_max"] for _, metrics in resumed) > 0


def test_a_run_does_not_begin_to_replay_masks_of_completions_that_have_none(tmp_path):
    job = small_job(**IN_PARTS)
    arrays = {"source/begun/records": Array((3, 80), "uint8", (1, 80))}

    def check(masked, arrays=arrays, job=job):
        check_facts(Recorded(tmp_path, arrays, {"provenance": {"flags": {"mask_replay": masked}}}), job)

    check(masked=True)
    check(masked=False, job=small_job(**IN_PARTS | {"mask_replay": False, "top_p": 1.0, "temperature": 1.0}))
    check(masked=False, arrays={"source/begun/records": Array((0, 0), "uint8", (0, 0))})
    with pytest.raises(CheckpointError, match="has 3 prompts whose completions of --new_tokens_per_step lack"):
        check(masked=False)


@pytest.mark.parametrize(
    "how,message",
    [
        ({}, "--mask_replay does nothing without --top_k, --top_p or --min_p"),
        ({"top_p": 0.9, "repetition_penalty": 1.1}, "--mask_replay with --repetition_penalty=1.1"),
        (
            {"top_p": 0.9, "engine": "hf"},
            "--mask_replay with --engine=hf: it records no masks; give --engine=native or vllm",
        ),
        ({"top_p": 0.9, "compose": chord}, "--mask_replay: demonstrations, which the algorithm reads"),
        ({"top_p": 0.9, "compose": prime}, "--mask_replay: the implicit_reward's log-probabilities are not truncated"),
        ({"top_p": 0.9, "backend": "xla"}, "--mask_replay with --backend=xla: give --backend=torch"),
    ],
)
def test_what_is_not_replayed_is_refused(how, message):
    with pytest.raises(SettingsError, match=message):
        small_job(**{"compose": GRPO, "sizes": None, "mask_replay": True} | how)
