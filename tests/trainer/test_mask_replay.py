"""The tokens that an engine could have sampled: recorded, moved with rows, and the trainer's distribution."""

import functools
import json

import pytest
import torch
from small_runs import GRPO, PPO, SIZES, assert_same, begin, run_steps, scored_batch, small_job, steps_program
from test_episode_runs import Branching, episode_job

from funrl import trees
from funrl.algos.recipes.chord import chord
from funrl.algos.recipes.prime import prime
from funrl.compiled_kernels.kernel_library import library_problem
from funrl.compiled_kernels.truncated_scores import KeptTokens
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.models.decoder.routing import Experts
from funrl.rollout.episode_records import record_from_json, to_json
from funrl.rollout.episode_replay import completion_of
from funrl.rollout.episodes import Episode, Node, Trajectory, from_record, to_record
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.requests import Request
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.gap import GAP_METRIC
from funrl.trainer.phases import draw_batch
from funrl.trainer.settings.declaration import SettingsError

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


def check_truncated(trainer, state, batch, how):
    """Masks, log-probabilities and entropies are those of a loop over the trained tokens."""
    role = trainer.parts.roles["policy"]
    params = state.roles["policy"].params
    masks = masks_of(batch)
    assert set(masks) == {tuple(place) for place in batch.mask.nonzero().tolist()} and len(masks) > 20
    logits_NV = role.placed.logits(params, batch)
    scores = role.placed.token_scores(params, batch, ("logp", "entropy"), role.temperature)
    for (row, position), logits_V in zip(batch.mask.nonzero().tolist(), logits_NV, strict=True):
        expected = kept_of(logits_V, how)
        assert masks[row, position] == expected
        logp_K = (logits_V / how.get("temperature", 1.0))[expected].log_softmax(-1)
        token = expected.index(int(batch.tokens[row, position]))
        assert batch.rollout_logp[row, position].item() == pytest.approx(logp_K[token].item(), abs=1e-9)
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
@pytest.mark.parametrize("mesh", [{"mesh": "ep2", "generate_mesh": "dp2"}, {"mesh": "ep2,sp2", "fsdp": True}], ids=str)
def test_experts_replay_the_same_on_every_mesh(mesh):
    alone = run_steps(1, **OF_EXPERTS)
    steps = run_steps(1, **OF_EXPERTS, **mesh)
    assert_same(steps, alone, 1e-9)
    assert [run["metrics"][0][GAP_METRIC] for run in (alone, steps)] == [0, 0]


@pytest.mark.parametrize(
    "how,message",
    [
        ({}, "--mask_replay does nothing without --top_k, --top_p or --min_p"),
        ({"top_p": 0.9, "repetition_penalty": 1.1}, "--mask_replay with --repetition_penalty=1.1"),
        (
            {"top_p": 0.9, "engine": "hf"},
            "--mask_replay with --engine=hf: it records no masks; give --engine=native or vllm",
        ),
        ({"top_p": 0.9, "new_tokens_per_step": 2}, "--mask_replay with --new_tokens_per_step=2: such rows"),
        ({"top_p": 0.9, "staleness": 1, "place": "train:dp1 generate:dp1"}, "--mask_replay with --"),
        (
            {"top_p": 0.9, "task": "arithmetic_moe", "mesh": "ep2", "generate_mesh": "ep2"},
            "--generate_mesh=ep2: ranks of",
        ),
        ({"top_p": 0.9, "compose": chord}, "--mask_replay: demonstrations, which the algorithm reads"),
        ({"top_p": 0.9, "compose": prime}, "--mask_replay: the implicit_reward's log-probabilities are not truncated"),
        ({"top_p": 0.9, "backend": "xla"}, "--mask_replay with --backend=xla: give --backend=torch"),
    ],
)
def test_what_is_not_replayed_is_refused(how, message):
    with pytest.raises(SettingsError, match=message):
        small_job(**{"compose": GRPO, "sizes": None, "mask_replay": True} | how)
