"""No micro-batch waits for the device: every such wait is an error on "meta", as its tensors have no numbers."""

import functools

import numpy as np
import pytest
import torch
from device_waits import FAULTS, META, WAITS, no_waits
from selection import quick
from small_runs import SIZES, begin, scored_batch, small_job

from funrl import trees
from funrl.algos.recipes.distillation import distillation
from funrl.algos.recipes.dpo import dpo
from funrl.algos.recipes.gkd import gkd
from funrl.algos.recipes.ppo import ppo
from funrl.algos.recipes.prime import prime
from funrl.batch import map_fields
from funrl.compiled_kernels.varlen_attention import planned_segments
from funrl.mesh.mesh import single
from funrl.models import decoder_model, with_fields, with_value_head
from funrl.models.huggingface import directories as hf
from funrl.tasks import arithmetic
from funrl.trainer.sources.completion_scores import as_read, end_values
from funrl.trainer.steps import micro, score, step
from funrl.trainer.steps.learn import denominators
from funrl.trainer.steps.micro import own_micro_batches
from funrl.trainer.steps.score import score_role
from funrl.trainer.steps.step import LossTotals, gradient, train_step
from funrl.trainer.steps.step_rows import rows_of

BUDGET = 24  # tokens: a row or two in a micro-batch
CASES = {
    "a critic, a reference and a reward model": (functools.partial(ppo, entropy_coef=0.1), {"reward_model": "value"}),
    "an implicit reward model": (prime, {}),
    "a teacher's likely tokens": (functools.partial(distillation, kind="forward"), {"teacher": "decoder"}),
    "a teacher beside the policy": (gkd, {"teacher": "decoder"}),
    "pairs": (dpo, {"reward": None}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    decoder = decoder_model(with_fields(arithmetic.model_config(), **SIZES | {"layers": 1}))
    made = {"decoder": decoder, "value": with_value_head(decoder)}
    for name, model in made.items():
        folder = tmp_path_factory.mktemp(name)
        hf.save(folder, model, model.init(torch.Generator().manual_seed(3)), arithmetic.tokenizer())
        made[name] = str(folder)
    return made


def on_device(rows, mask="mask"):
    """The rows as the device has them, but for what the trainer reads once for all micro-batches of a pass."""
    rows = rows.with_fields(mask=getattr(rows.batch, mask))
    batch = map_fields(
        lambda name, x: x if name in ("mask", "length") else trees.map(lambda part: part.to(META), x), rows.batch
    )
    return rows_of(batch, rows.owner, single(META))


@pytest.mark.slow
@pytest.mark.parametrize("case", quick(CASES, ["a critic, a reference and a reward model"]))
def test_no_micro_batch_waits_for_the_device(case, models):
    make, settings = CASES[case]
    job = small_job(make, batch_prompts=3, **{name: models.get(value, value) for name, value in settings.items()})
    run, state = begin(job, single())
    rows, _, _ = scored_batch(run, state)
    frozen = trees.map(lambda x: x.to(META), run.frozen)
    params = {name: trees.map(lambda x: x.to(META), role.params) for name, role in state.roles.items()} | frozen
    learning = {name: role for name, role in run.parts.roles.items() if role.loss is not None}
    (totals,) = denominators(learning, rows, [np.arange(len(rows.owner))])
    totals = {name: [den.to(META) for den in dens] for name, (dens, _) in totals.items()}
    read = on_device(as_read(rows, job.pad)) if "reward_model" in frozen else None
    there, pieces = {role.mask: on_device(rows, role.mask) for role in run.parts.roles.values()}, 0
    with no_waits():
        for name, role in run.parts.roles.items():
            if role.writes:
                assert all(x.device == META for x in score_role(role, params[name], there["mask"], BUDGET).values())
        if read is not None:
            assert end_values(run.parts.roles["reward_model"], params["reward_model"], read, BUDGET).device == META
        for name, role in learning.items():
            made = list(own_micro_batches(there[role.mask], BUDGET))
            batches = [piece.batch for piece in made]
            for piece in made:  # kernels on a GPU plan for these, and not for the room of the batch
                offsets, longest = planned_segments(piece.batch.offsets, 10**6)
                assert longest == piece.at.longest <= BUDGET and len(offsets) - 1 <= 8 * max(1, len(piece.rows))
            grads, _, loss, *_ = gradient(role, params[name], batches, totals[name], frozen)
            assert loss.device == META and all(x.device == META for x in trees.leaves(grads))
            pieces += len(batches)
    assert pieces > 2 * len(learning)


def meta_update(state, rows, role, name, totals):
    """An update of a role on the device: its state, micro-batches and totals."""
    pieces = [piece.batch for piece in own_micro_batches(on_device(rows, role.mask), BUDGET)]
    before = trees.map(lambda x: x.to(META), state.roles[name])
    total = LossTotals(tuple(x.to(META) for x in totals[name].denominators), totals[name].tokens.to(META))
    return before, pieces, total


def read_numbers(reads):
    """`Tensor.cpu` that gives 1s for numbers on the device, and notes their shapes."""

    def read(x):
        reads.extend([tuple(x.shape)] * (x.device == META))
        return torch.ones(x.shape, dtype=x.dtype) if x.device == META else x

    return read


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "schedule"), [pytest.param("adamw", "cosine", marks=pytest.mark.slow), ("muon", "linear")]
)
def test_an_update_waits_once(optimizer, schedule):
    """It reads the loss, the gradient's norm and the number of tokens together, and nothing else."""
    run, state = begin(
        small_job(ppo, optimizer=optimizer, lr_schedule=schedule, weight_decay=0.1, batch_prompts=2), single()
    )
    rows, _, _ = scored_batch(run, state)
    learning = {name: role for name, role in run.parts.roles.items() if role.loss is not None}
    (totals,) = denominators(learning, rows, [np.arange(len(rows.owner))])
    reads = []
    for name, role in learning.items():
        given = meta_update(state, rows, role, name, totals)
        with no_waits(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "cpu", read_numbers(reads))
            after, metrics = train_step(role, *given)
        assert all(x.device == META for x in (*trees.leaves(after.params), *metrics.values()))
    assert reads == [(3,)] * len(learning)


PLACES = {  # a function of a micro-batch that scores, of one that learns, and of an update
    "scoring": (score, "unpack_tokens"),
    "micro-batch": (step, "value_of"),
    "packing": (micro, "pack_tokens"),
    "update": (step, "step_"),
}
QUICK = [("scoring", "item"), ("update", "item")]


@pytest.fixture(scope="module")
def updated():
    """Score rows and learn from them on the device, where nothing waits."""
    run, state = begin(small_job(ppo, batch_prompts=2), single())
    rows, _, _ = scored_batch(run, state)
    role = run.parts.roles["policy"]
    (totals,) = denominators({"policy": role}, rows, [np.arange(len(rows.owner))])
    given = meta_update(state, rows, role, "policy", totals)
    there = on_device(rows)

    def updated():
        with no_waits(), pytest.MonkeyPatch.context() as patch:
            read = torch.Tensor.cpu
            patch.setattr(torch.Tensor, "cpu", lambda x: torch.ones(3) if x.shape == (3,) else read(x))
            score.score_role(role, given[0].params, there, BUDGET)
            train_step(role, *given)

    updated()
    return updated


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        pytest.param(place, fault, marks=[] if (place, fault) in QUICK else pytest.mark.slow)
        for number, fault in enumerate(FAULTS)
        for place in ([*PLACES] if fault == "item" else [[*PLACES][number % 2]])
    ],
)
def test_what_waits_is_found(place, fault, updated, monkeypatch):
    """A fault in each place, which the tests above would be failed by."""
    module, name = PLACES[place]
    sound = getattr(module, name)

    def waiting(*args, **kwargs):
        out = sound(*args, **kwargs)
        for x in trees.leaves(out)[:1]:
            if x.device == META:
                FAULTS[fault](x)
        return out

    monkeypatch.setattr(module, name, waiting)
    with pytest.raises(AssertionError, match=WAITS):
        updated()
