"""Runs that generate with vLLM, in their processes and by servers: its log-probabilities are the trainer's."""

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import time
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from forked_python import start_python
from small_runs import GRPO, PPO, Quiet, begin, digits_reward, run_steps, scored_batch, small_job
from test_episode_runs import episode_job

from funrl import trees
from funrl.algos import (
    Algorithm,
    add,
    apply_advantage,
    chain,
    clipped_surrogate,
    group_center,
    importance_weights,
    masked_importance,
    reduce,
    sequence_mean,
    sequence_ratio,
    to_tokens,
    weighted,
)
from funrl.algos.recipes.rollout_is import rollout_is
from funrl.batch import with_rows_spread
from funrl.cli.main import main
from funrl.mesh.launch import WorkerError, launch
from funrl.mesh.mesh import single
from funrl.processes.workers import can_fork
from funrl.rollout.episodes import Episode
from funrl.rollout.vllm.client import EngineServerError, vllm_client
from funrl.rollout.vllm.engine import VLLMEngine
from funrl.trainer import loop, phases
from funrl.trainer.placement.board import GroupBoard
from funrl.trainer.placement.generate import GroupWriter
from funrl.trainer.placement.ranks import run_rank
from funrl.trainer.settings.declaration import SettingsError

SIZES = {"embed": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head": 32, "mlp": 48}
VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not VLLM, reason="no vLLM here: ./test --all makes .venv-vllm for it")


class Server(NamedTuple):
    """A server of vLLM."""

    url: str
    process: subprocess.Popen


@pytest.fixture(scope="module")
def server():
    """A server with the model of the runs with `SIZES`; the last test that uses it kills it."""
    with start_python(["-m", "funrl.rollout.vllm.server", "--port=0"], os.environ, stderr=None) as program:
        assert program.stdout is not None
        try:
            message = next((line for line in program.stdout if line.startswith("listening at ")), None)
            assert message is not None, program.wait(60)  # libraries may write lines of their own before it
            url = message.split()[-1]
            vllm_client(url, small_job(GRPO, sizes=SIZES, dtype="float32").model)
            yield Server(url, program)
        finally:
            program.kill()


AHEAD = {"place": "train:dp1 generate:dp1", "staleness": 2, "steps": 7, "max_new_tokens": 12, "eval_every": 9}


class Token(NamedTuple):
    """A token that a policy sampled: its step, row and version, and the gap to that version's trainer."""

    step: int
    row: int
    version: int
    gap: float


@contextlib.contextmanager
def weights_amid_rows():
    """Few rows run at a time; once the first batch is complete, those of others wait with a token for new weights.

    Ranks have it as forks, so its tests come before the ones with gradients in this process.
    """
    assert can_fork()
    delivered = set()
    step = GroupWriter.step
    deliver = GroupBoard.deliver

    def noted(board, group):
        delivered.add(group.work.place)
        deliver(board, group)

    def held(writer):
        engine = writer.engine
        running = any(engine.sampled(number) for number in writer.resident._waiting)
        is_due = delivered >= {0, 1, 2, 3} and engine.version == 1 and running
        if is_due and writer._latest_version() > 1:  # no evaluation is of the first weights
            time.sleep(0.001)
        else:
            step(writer)

    room = mock.patch.object(VLLMEngine, "room", lambda engine: max(0, 8 - engine.unfinished()))
    steps = mock.patch.object(GroupWriter, "step", held)
    with room, steps, mock.patch.object(GroupBoard, "deliver", noted):
        yield


@contextlib.contextmanager
def scored_by_their_versions(file):
    """Each token that is learned from is scored by the weights that it is said to be of, and noted in a file."""
    weights = {}
    sync = phases.sync
    learn = phases.learn_batch

    def synced(parts, state, *rest, **named):
        weights[state.version + 1] = trees.map_named(lambda _, x: x.clone(), state.roles["policy"].params)
        return sync(parts, state, *rest, **named)

    def learned(trainer, state, rows):
        role = trainer.parts.roles["policy"]
        batch = rows.batch
        with torch.no_grad():
            scores = {
                v: role.placed.token_scores(role.whole(weights[v], trainer.frozen), batch).logp
                for v in batch.version[batch.mask].unique().tolist()
            }
        with file.open("a") as lines:
            for row, place in batch.mask.nonzero().tolist():
                version = int(batch.version[row, place])
                gap = abs(float(scores[version][row, place] - batch.rollout_logp[row, place]))
                print(json.dumps(Token(state.step + 1, row, version, gap)), file=lines)
        return learn(trainer, state, rows)

    with mock.patch.object(loop, "sync", synced), mock.patch.multiple(phases, sync=synced, learn_batch=learned):
        yield


def check_ahead(steps, file):
    """Each token is of the version that it is said to be of, none is older than 2, and no row is missing."""
    tokens = [Token(*json.loads(line)) for line in file.read_text().splitlines()]
    assert [metrics["age/max"] <= 2 for metrics in steps] == [True] * 7
    assert max(token.gap for token in tokens) < 1e-4
    assert all(0 <= token.step - token.version <= 2 for token in tokens)
    assert {(token.step, token.row) for token in tokens} == set(itertools.product(range(1, 8), range(8)))
    versions = {(token.step, token.row, token.version) for token in tokens}
    assert len(versions) > 7 * 8  # weights came amid a row
    assert max(metrics["rollout/stale_gap_max"] for metrics in steps) > 1e-2  # versions differ by more than the bound
    assert all(metrics["rollout/logprob_gap_max"] < 1e-4 for metrics in steps)


@needs_vllm
@pytest.mark.gloo
def test_a_server_writes_ahead_by_the_weights_that_it_says(server, tmp_path):
    flags = {"engine": "vllm_server", "engine_url": server.url}
    job = small_job(rollout_is, sizes=SIZES, dtype="float32", **AHEAD, **flags)
    with weights_amid_rows(), scored_by_their_versions(tmp_path / "tokens"):
        steps = launch(functools.partial(steps_of_rank, job), job.launched, "cpu")
    check_ahead(steps, tmp_path / "tokens")


@needs_vllm
@pytest.mark.gloo
def test_vllm_on_ranks_of_its_own_writes_ahead_and_its_run_is_repeated_by_its_rows(tmp_path, capsys):
    saved = {"dtype": "float32", "warmstart_steps": 0, "batch_prompts": 4, "samples_per_prompt": 2, "device": "cpu"}
    saved |= {"eval_prompts": 6, "compile": "off", "lr": 1e-2, "save_rollouts": 1, "run_dir": tmp_path / "run"}
    (tmp_path / "p.jsonl").write_text("".join(f'{{"prompt": "{i}+{i}="}}\n' for i in range(40)))
    (tmp_path / "r.py").write_text(
        "def twos(prompt, completion):\n    return completion.count('2') - completion.count('+')"
    )
    saved |= {"prompts": tmp_path / "p.jsonl", "reward": f"{tmp_path}/r.py:twos", "reward_workers": 0}
    flags = [f"--{name}={value}" for name, value in (AHEAD | saved | {"engine": "vllm"}).items()]
    with weights_amid_rows(), scored_by_their_versions(tmp_path / "tokens"):
        assert main(["funrl", "rollout_is", *flags]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    check_ahead([json.loads(line) for line in lines], tmp_path / "tokens")
    capsys.readouterr()
    assert main(["funrl", "replay", str(tmp_path / "run"), "--rows"]) == 0
    assert capsys.readouterr().out.count("the same bits") == 7
    assert main(["funrl", "replay", str(tmp_path / "run")]) == 2
    assert "depend on the rows beside (--engine=vllm); --rows repeats its training" in capsys.readouterr().err


@needs_vllm
@pytest.mark.parametrize(
    "how",
    [{"top_p": 0.8, "temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8, "new_tokens_per_step": 2, "max_new_tokens": 6}],
    ids=str,
)
def test_masks_of_vllm_are_those_of_the_native_engine(how):
    settings = {"compose": GRPO, "sizes": SIZES, "dtype": "float32", "mask_replay": True, **how}
    done, peer = (run_steps(2, engine=engine, **settings) for engine in ("vllm", "native"))
    assert 0 < max(metrics["rollout/logprob_gap_max"] for metrics in done["metrics"]) < 1e-4
    for batch, other in zip(done["batches"], peer["batches"], strict=True):
        assert batch.tokens.equal(other.tokens) and batch.kept_counts.equal(other.kept_counts)
        assert batch.kept.values.equal(other.kept.values) and batch.kept_counts[batch.mask].min() >= 1
        assert (batch.rollout_logp - other.rollout_logp).abs().max() < 1e-4


ADAPTERS = {"lora_rank": 3, "lora_alpha": 4.0, "lr": 0.05}


@needs_vllm
@pytest.mark.parametrize("mesh", [pytest.param("tp2", marks=pytest.mark.gloo), "dp1"])
def test_with_adapters_a_sync_gives_vllm_these_alone(mesh):
    settings = {"sizes": SIZES, "dtype": "float32", "mesh": mesh, "generate_mesh": mesh} | ADAPTERS
    job = small_job(GRPO, engine="vllm", probe_sync_every=1, steps=3, **settings)
    steps = launch(functools.partial(steps_of_rank, job), job.sizes, "cpu")
    rows = {"q": 128, "k": 64, "v": 64, "o": 128, "gate": 48, "up": 48, "down": 48}
    nbytes = 4 * SIZES["layers"] * 3 * sum(size + SIZES["embed"] for size in rows.values())
    assert {metrics["sync/bytes"] for metrics in steps} == {nbytes}
    assert {metrics["sync/verified"] for metrics in steps} == {1.0}
    assert max(metrics["sync/probe_gap"] for metrics in steps) < 1e-4
    assert max(metrics["rollout/logprob_gap_max"] for metrics in steps) < 1e-4
    done, peer = (run_steps(3, compose=GRPO, engine=engine, **settings) for engine in ("vllm", "native"))
    for completion, other in zip(done["batches"], peer["batches"], strict=True):
        assert completion.tokens.equal(other.tokens)
        assert (completion.rollout_logp - other.rollout_logp).abs().max() < 1e-4
    assert not done["batches"][0].rollout_logp.equal(done["batches"][2].rollout_logp)


@needs_vllm
@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs funrl[nf4]")
def test_vllm_gets_the_values_of_a_base_in_4_bits():
    settings = {"sizes": SIZES | {"embed": 64, "mlp": 64}, "dtype": "float32", "base_format": "nf4"} | ADAPTERS
    job = small_job(GRPO, engine="vllm", probe_sync_every=1, steps=2, **settings)
    for metrics in launch(functools.partial(steps_of_rank, job), job.sizes, "cpu"):
        assert metrics["sync/verified"] == 1.0 and metrics["sync/probe_gap"] < 1e-4
        assert metrics["rollout/logprob_gap_max"] < 1e-4


@needs_vllm
@pytest.mark.gloo
def test_a_row_that_runs_ahead_ends_with_the_adapter_that_it_began_with(tmp_path):
    job = small_job(rollout_is, sizes=SIZES, dtype="float32", engine="vllm", **AHEAD, **ADAPTERS)
    with scored_by_their_versions(tmp_path / "tokens"), weights_amid_rows():
        steps = launch(functools.partial(steps_of_rank, job), job.launched, "cpu")
    tokens = [Token(*json.loads(line)) for line in (tmp_path / "tokens").read_text().splitlines()]
    assert max(token.gap for token in tokens) < 1e-4
    versions = {(token.step, token.row, token.version) for token in tokens}
    assert len(versions) == 7 * 8 and any(step - version > 1 for step, _, version in versions)
    # A step that ends before the generators have its weights has no comparison of its own; the first is waited for.
    verified = [metrics["sync/verified"] for metrics in steps if "sync/verified" in metrics]
    assert set(verified) == {1.0} and "sync/verified" in steps[0]


@needs_vllm
@pytest.mark.parametrize("mesh", [pytest.param("tp2", marks=pytest.mark.gloo), "dp1"])
def test_steps_of_ppo_have_the_trainers_log_probabilities(mesh):
    settings = {"dtype": "float32", "mesh": mesh, "generate_mesh": mesh, "temperature": 0.8, "max_new_tokens": 8}
    done, peer = (run_steps(2, compose=PPO, sizes=SIZES, engine=engine, **settings) for engine in ("vllm", "native"))
    assert 0 < max(reported["rollout/logprob_gap_max"] for reported in done["metrics"]) < 1e-4
    # The noise is the same, so the native engine draws the same tokens, and learns the same.
    for completion, other in zip(done["batches"], peer["batches"], strict=True):
        assert completion.tokens.equal(other.tokens)
        assert (completion.rollout_logp - other.rollout_logp).abs().max() < 1e-4


@needs_vllm
def test_steps_with_a_server_are_those_of_the_native_engine(server):
    flags = {"engine": "vllm_server", "engine_url": server.url}
    done = run_steps(2, compose=GRPO, sizes=SIZES, dtype="float32", **flags)
    peer = run_steps(2, compose=GRPO, sizes=SIZES, dtype="float32")
    for completion, other in zip(done["batches"], peer["batches"], strict=True):
        assert completion.tokens.equal(other.tokens)
        assert (completion.rollout_logp - other.rollout_logp).abs().max() < 1e-4


@needs_vllm
@pytest.mark.gloo
def test_a_server_generates_for_ranks_that_only_generate(server):
    check_placed(engine="vllm_server", engine_url=server.url, place="train:dp1 generate:dp1")


@needs_vllm
@pytest.mark.gloo
def test_vllm_generates_on_the_ranks_that_only_generate():
    check_placed(engine="vllm", place="train:dp1 generate:tp2")


def check_placed(**settings):
    """Ranks that only generate give the native engine's rewards and the trainer's log-probabilities."""
    done, native = placed_steps(**settings), native_steps()
    assert len(done) == 3 and [x["reward/mean"] for x in done] == [x["reward/mean"] for x in native]
    gaps = [metrics["rollout/logprob_gap_max"] for metrics in done]
    assert 0 < max(gaps) < 1e-4  # of a step it may be 0: by the native engine it is in all
    assert {metrics["sync/verified"] for metrics in done} == {1.0}


@functools.cache
def native_steps():
    """`placed_steps` of the native engine."""
    return placed_steps(place="train:dp1 generate:dp1")


def placed_steps(**settings):
    """Metrics of the steps of a run whose ranks train or generate."""
    job = small_job(GRPO, sizes=SIZES, dtype="float32", **settings)
    return launch(functools.partial(steps_of_rank, job), job.launched, "cpu")


def steps_of_rank(job, mesh):
    observer = Quiet()
    outcome = run_rank(job, mesh, observer)
    assert outcome.error is None
    return [metrics for _, metrics in observer.steps]


@dataclasses.dataclass
class Killing:
    """A reward that kills a process at its 20th call: of two batches and an evaluation, at most."""

    pid: int
    calls: int = 0

    def __call__(self, prompt, completion, **fields):
        self.calls += 1
        if self.calls == 20:
            os.kill(self.pid, signal.SIGKILL)
        return digits_reward(prompt, completion)


@needs_vllm
@pytest.mark.gloo
def test_a_server_that_is_killed_ahead_of_the_trainer_is_named_within_its_limit(server):
    flags = {"engine": "vllm_server", "engine_url": server.url, "engine_timeout": 4.0}
    job = small_job(rollout_is, sizes=SIZES, dtype="float32", reward=Killing(server.process.pid), **AHEAD, **flags)
    with pytest.raises(WorkerError, match=f"(?s)rank 1.*the server {server.url} has not answered for 4 s"):
        launch(functools.partial(steps_of_rank, job), job.launched, "cpu")
    assert server.process.wait(timeout=10) == -signal.SIGKILL  # it was not slow, but gone


class Tree:
    """Branches and retries that the example decides, two agents, and rewards by turn."""

    agents = ("policy", "judge")

    async def run(self, policy, example, seed):
        chance = random.Random(seed)
        ends = [(await policy.sample(policy.start(example.tokens), max_tokens=4))[1]]
        for _ in range(4):
            heard = policy.extend(chance.choice(ends), [5, 6][: chance.randint(1, 2)])
            ends.append((await policy.sample(heard, max_tokens=chance.randint(1, 5)))[1])
        verdict = (await policy.sample(policy.start([7, *example.tokens], agent="judge"), max_tokens=2))[1]
        rewards = {"policy": chance.random(), "judge": chance.choice([None, 0.5])}
        return Episode([*ends, verdict], rewards, {ends[0].leaf: 0.25})


def bounded():
    """A loss with the engine's log-probabilities in it, by token and by episode."""
    advantage = chain(importance_weights("geometric", 0.5, 2.0), group_center(), to_tokens())
    term = weighted(clipped_surrogate(ratio=sequence_ratio()))
    return Algorithm(advantage, {"policy": reduce(add(term, masked_importance()), sequence_mean())})


def golden(algorithm, batch):
    """Loss and gradient of rows, as numbers."""
    made = apply_advantage(algorithm.advantage, algorithm.advantage.init(), batch)[0]
    logp = (made.old_logp.double() + 0.1 * torch.arange(made.mask.shape[1]).sin()).requires_grad_()
    loss, _ = algorithm.losses["policy"](logp, with_rows_spread(made))
    (gradient,) = torch.autograd.grad(loss, logp)
    return torch.stack([loss.detach(), gradient.norm(), gradient.abs().max()])


@needs_vllm
def test_episodes_have_the_trainers_log_probabilities_and_the_native_engines_numbers():
    """On what vLLM sampled: a draw within rounding of a boundary may give another token than the native engine's."""
    settings = {"dtype": "float32", "samples_per_prompt": 4, "max_new_tokens": 6, "sizes": SIZES}
    made = {}
    for engine in ("vllm", "native"):
        run, state = begin(episode_job(bounded, Tree(), engine=engine, **settings), single())
        rows, _, _ = scored_batch(run, state)
        made[engine] = rows.batch
    batch = made["vllm"]
    gap = (batch.rollout_logp - batch.old_logp)[batch.mask].abs()
    assert 0 < gap.max() < 1e-5 and batch.mask.sum() > 60
    assert not batch.episode_first.all() and batch.agent.max() == 1
    exact = batch._replace(rollout_logp=batch.old_logp)  # a native engine's, whose gap is 0
    chosen = bounded()
    torch.testing.assert_close(golden(chosen, batch), golden(chosen, exact), rtol=1e-5, atol=1e-5)
    peer = made["native"]
    same = batch.tokens.shape == peer.tokens.shape and batch.tokens.equal(peer.tokens)
    if same:  # no draw was so close
        assert (batch.rollout_logp - peer.rollout_logp).abs().max() < 1e-5
        torch.testing.assert_close(golden(chosen, batch), golden(chosen, peer), rtol=1e-5, atol=1e-5)


def test_the_servers_of_a_run_are_one_for_each_data_rank():
    flags = {"engine": "vllm_server", "dtype": "float32", "engine_url": "http://a:1,http://b:2"}
    assert small_job(GRPO, mesh="dp2", **flags)
    for more, message in (
        ({"mesh": "dp1"}, "2 servers, which hold whole models, .* each of its 1 data ranks"),
        ({"mesh": "dp2,tp2", "generate_mesh": "dp2,tp2"}, "a --generate_mesh without tp"),
        ({"engine_url": "http://a"}, "--engine_url=http://a: it must be http://HOST:PORT"),
        ({"engine_url": None}, "--engine=vllm_server needs --engine_url"),
        ({"engine": "native"}, "does nothing without --engine=vllm_server"),
        ({"engine_url": None, "engine": "native", "engine_timeout": 3.0}, "--engine_timeout=3 does nothing"),
    ):
        with pytest.raises(SettingsError, match=message):
            small_job(GRPO, **{"mesh": "dp2"} | flags | more)


def test_a_run_waits_for_its_server_and_names_it():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        flags = {"engine": "vllm_server", "dtype": "float32", "engine_url": url, "engine_timeout": 0.2}
        with pytest.raises(EngineServerError, match=f"{url} has not answered for 0.2 s"):
            begin(small_job(GRPO, **flags), single())


@pytest.mark.skipif(VLLM, reason="vLLM is installed here")
def test_without_vllm_a_run_says_what_to_install():
    with pytest.raises(SettingsError, match=r"--engine=vllm: vLLM is not installed beside funrl: .*setup_vllm"):
        small_job(GRPO, engine="vllm", dtype="float32")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float64"}, "vLLM has no float64; use --dtype=float32 or bfloat16"),
        ({"dtype": "float32", "kv_cache_gb": 1e-5}, "a cache of 1e-05 GB is too small: .* 64 tokens, 0.00026 GB"),
    ],
)
def test_a_run_that_vllm_cannot_generate_for_is_refused(settings, message):
    with pytest.raises(SettingsError, match=f"--engine=vllm: .*{message}"):
        small_job(GRPO, engine="vllm", **settings)
    with pytest.raises(SettingsError, match="--dry_run with --engine=vllm: it counts the native engine"):
        small_job(GRPO, engine="vllm", dry_run=True)
