"""Teachers of sources of prompts, each beside a loop over its rows alone, on several meshes."""

import functools
import json
from pathlib import Path

import pytest
import torch
from selection import quick
from small_runs import assert_same, begin, run_steps, scored_batch, small_job
from test_placement_runs import assert_same_runs, run

from funrl import trees
from funrl.algos import by_source
from funrl.algos.recipes.distillation import distillation
from funrl.algos.recipes.gkd import gkd
from funrl.algos.recipes.grpo import grpo
from funrl.algos.recipes.mopd import mopd
from funrl.batch import Batch
from funrl.cost import dry_run
from funrl.cost.tracing.hardware import HARDWARE
from funrl.mesh.mesh import single
from funrl.models import decoder_model, with_fields
from funrl.models.huggingface import directories as hf
from funrl.tasks.embedded import embedded_task
from funrl.trainer.jobs.models import with_teachers
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.scorers import sourced_paths, with_paths
from funrl.trainer.settings.settings import settings_of
from funrl.trainer.steps.roles import role_names

FUNCTIONS = Path(__file__).with_name("functions_of_flags.py")
NAMES = ("teacher_easy", "teacher_hard")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prompts of two sources, and two teachers of different widths."""
    folder = tmp_path_factory.mktemp("teachers")
    records = [{"prompt": f"{n}+{n % 7}=", "data_source": "hard" if n % 3 else "easy"} for n in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    task = embedded_task("arithmetic")
    for seed, width in ((1, 16), (2, 32)):
        config = with_fields(task.model_config(1), embed=width, layers=seed, heads=4, kv_heads=2, head=4, mlp=32)
        model = decoder_model(config)
        params = model.init(torch.Generator().manual_seed(seed), torch.float64)
        hf.save(folder / f"t{seed}", model, params, task.tokenizer())
    return folder


def given(folder, **settings):
    values = {"prompts": str(folder / "prompts.jsonl"), "reward": f"{FUNCTIONS}:digits", "batch_prompts": 6}
    return values | {"eval_prompts": 2, "teacher": f"{folder}/t1@easy,{folder}/t2@hard"} | settings


def test_each_teacher_scores_the_rows_of_its_source_alone(folder):
    """By one pass over each row, in float64."""
    run, state = begin(small_job(mopd, **given(folder)), single())
    assert [name for name in run.parts.roles if name.startswith("teacher")] == list(NAMES)
    scored = []
    for name in NAMES:
        role = run.parts.roles[name]
        count = role.placed.token_scores

        def counted(params, rows, *rest, name=name, count=count):
            scored.append((name, int(rows.mask.sum())))
            return count(params, rows, *rest)

        object.__setattr__(role.placed, "token_scores", counted)
    rows, _, _ = scored_batch(run, state)
    batch = rows.batch
    of_source = batch.data_source[:, None].expand(batch.mask.shape)
    for number, name in enumerate(NAMES):
        assert sum(tokens for role, tokens in scored if role == name) == int((batch.mask & (of_source == number)).sum())
    for row in range(len(batch.tokens)):
        name = NAMES[int(batch.data_source[row])]
        end = int(batch.length[row])
        alone = Batch(tokens=batch.tokens[row : row + 1, :end].long(), mask=batch.mask[row : row + 1, :end])
        role = run.parts.roles[name]
        logp = type(role.placed).token_scores(role.placed, run.frozen[name], alone).read("logp")[0]
        here = batch.mask[row, :end]
        assert torch.allclose(batch.teacher_logp[row, :end][here], logp[here], atol=1e-12, rtol=0)


@pytest.mark.parametrize("mesh", quick(["dp2", "tp2", "dp2,sp2", "dp2,tp2"], ["dp2"]))
def test_a_run_has_the_same_numbers_on_every_mesh(mesh, folder):
    values = {"compose": mopd, **given(folder)}
    assert_same(run_steps(2, **values), run_steps(2, mesh=mesh, **values), 1e-9)


@pytest.mark.parametrize("fsdp", [{"fsdp": True}, {"fsdp": True, "fsdp_models": "teacher_hard"}])
def test_teachers_may_be_sharded(fsdp, folder):
    values = {"compose": mopd, **given(folder)}
    assert_same(run_steps(2, **values), run_steps(2, mesh="dp2", **values, **fsdp), 1e-9)


@pytest.mark.gloo
@pytest.mark.slow
def test_ranks_of_their_own_score_the_same(folder):
    """Also in steps without a row for one of them."""
    values = given(folder, batch_prompts=1, steps=4)
    placed = run(mopd, place="generate:1 teacher_easy:1 teacher_hard:tp2", **values)
    assert_same_runs(placed, run(mopd, **values), 1e-9)


def test_a_step_without_prompts_of_a_source_has_zeros_there(folder):
    """With one prompt a step, one teacher has no row and does no pass."""
    compose = functools.partial(by_source, {"easy": distillation(direct=True), "hard": grpo()})
    run, state = begin(small_job(compose, **given(folder, batch_prompts=1, teacher=f"{folder}/t1@easy")), single())
    sources = set()
    for _ in range(4):
        rows, state, _ = scored_batch(run, state)
        batch = rows.batch
        sources |= {*batch.data_source.tolist()}
        assert bool(batch.teacher_logp.any()) == (int(batch.data_source[0]) == 0)
        state = state._replace(step=state.step + 1)
    assert sources == {0, -1}


def test_one_directory_for_two_sources_is_one_model(folder):
    run, _ = begin(small_job(mopd, **given(folder, teacher=f"{folder}/t1@easy,{folder}/t1@hard")), single())
    assert [name for name in run.parts.roles if name.startswith("teacher")] == ["teacher_easy"]
    assert run.parts.roles["teacher_easy"].sources == (0, 1)


def test_the_dry_run_counts_the_memory_and_the_rows_of_each_teacher(folder):
    both = small_job(mopd, **given(folder, batch_prompts=64), sizes={})
    first = small_job(mopd, **given(folder, batch_prompts=64, teacher=f"{folder}/t1"), sizes={})
    costs, alone = (dry_run.estimate(job, 8, HARDWARE["cpu"]) for job in (both, first))
    assert {"score_teacher_easy", "score_teacher_hard"} <= set(costs.phases)
    half, whole = costs.phases["score_teacher_easy"], alone.phases["score_teacher"]
    assert 0.3 * whole.flops < half.flops < 0.7 * whole.flops
    weights = 8 * sum(x.numel() for x in trees.leaves(hf.load(folder / "t2", torch.float64)[1]))
    held = costs.phases["score_policy"].peak["weights"] - alone.phases["score_policy"].peak["weights"]
    assert held == pytest.approx(weights)


@pytest.mark.parametrize(
    ("recipe", "teacher", "text"),
    [
        (mopd, "{}/t1@easy", "no teacher for the source 'hard'.*easy, hard"),
        (mopd, "{}/t1@easy,{}/t2@hard,{}/t2@chat", "no prompts of the source 'chat'"),
        (mopd, "{}/t1@easy,{}/t2", "write DIR@SOURCE"),
        (mopd, "{}/t1@easy,{}/t2@easy", "write DIR@SOURCE"),
        (mopd, "{}/t1@easy,{}/t3@hard", "t3 is not a directory"),
        (gkd, "{}/t1@easy,{}/t2@hard", "whole vocabulary is from one model"),
        (grpo, "{}/t1@easy,{}/t2@hard", "needs an algorithm that reads a teacher|reads a teacher"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(recipe, teacher, text, folder):
    with pytest.raises((SettingsError, ValueError), match=text):
        small_job(recipe, **given(folder, teacher=teacher.replace("{}", str(folder))))


def test_values_of_the_flag(tmp_path):
    settings = settings_of(teacher="a@math,b@chat,a@code", prompts="x.jsonl")
    assert sourced_paths(settings, "teacher") == {"math": "a", "chat": "b", "code": "a"}
    assert with_paths(settings, "teacher", str.upper) == "A@math,B@chat,A@code"
    algorithm = with_teachers(mopd(), settings)
    assert role_names(algorithm) == ("policy", "teacher_math", "teacher_chat")
    assert algorithm.roles["teacher_math"].sources == ("math", "code")
    home = tmp_path / "me@home"
    home.mkdir()
    plain = settings_of(teacher=str(home))
    assert sourced_paths(plain, "teacher") == {} and with_paths(plain, "teacher", str) == str(home)
    assert with_teachers(mopd(), plain).roles == {}
