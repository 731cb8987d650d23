"""Fields that a user's own file declares travel like the others: moved, packed, trained on, saved and replayed."""

import dataclasses

import numpy as np
import pytest
import torch
from small_runs import Quiet, small_job
from test_checkpoint import SETTINGS

from funrl import trees
from funrl.algos import Advantage, PieceError, chain, check, grpo, reads
from funrl.batch import Batch, as_dict, declare, select
from funrl.fields import FIELDS, Field
from funrl.kinds import FIELD_KINDS, Ragged
from funrl.loading import load_function
from funrl.mesh.collectives import gather_objects
from funrl.mesh.launch import launch, view
from funrl.mesh.mesh import parse, single
from funrl.mesh.rows import Owners, hand_over, move_rows
from funrl.testing import check_algorithm
from funrl.trainer.checkpoints.saved_rows import open_rows, read_rows, save_rows
from funrl.trainer.jobs.row_source import make_source
from funrl.trainer.loop import train_loop
from funrl.trainer.replay import own_differences, replay
from funrl.trainer.steps.micro import own_micro_batches
from funrl.trainer.steps.step_rows import join_rows, moved, split_rows, take
from funrl.trainer.storage.shard_server import DamagedError

OWN = '''
import torch

from funrl.algos import Advantage, Algorithm, add, chain, clipped_surrogate, group_center, reduce, scale, to_tokens
from funrl.algos import token_mean
from funrl.fields import Field
from funrl.kinds import Ragged


def curiosity():
    """How new each token is, how mixed its group, and the surprising values of a row, as many as it has."""

    def update(signal, state, batch):
        surprise = torch.where(signal.mask, -batch.old_logp, 0.0)
        high = signal.mask & (surprise > 1.0)
        counts = high.sum(1)
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        own = {"curiosity": surprise, "mixed": (batch.score - 0.5).abs(), "surprises": Ragged(surprise[high], offsets)}
        return signal._replace(extra=signal.extra | own), state

    fields = {"curiosity": Field("token", "advantage", "nats, how new the token is, made by curiosity()")}
    return Advantage(lambda: (), update, fields=fields)


def bonus():
    def term(logp, batch):
        return -batch.curiosity * batch.mixed * logp, {"curiosity": batch.curiosity}

    return term


def curious(coef: float = 0.1):
    """GRPO with a bonus for what is new."""
    terms = add(clipped_surrogate(), scale(coef, bonus()))
    return Algorithm(
        advantage=chain(group_center(), curiosity(), to_tokens()),
        losses={"policy": reduce(terms, token_mean())},
        fields={
            "mixed": Field("row", "advantage", "distance of the row's score from one half"),
            "surprises": Field("ragged", "advantage", "nats, of the tokens above 1 nat"),
        },
    )
'''


def with_fields(algorithm, fields):
    """The algorithm with declarations of further fields, and a piece that needs them."""

    def update(signal, state, batch):
        assert len(batch.marks.offsets) == len(signal.mask) + 1
        return signal, state

    advantage = chain(Advantage(lambda: (), update, fields=fields), algorithm.advantage)
    return dataclasses.replace(algorithm, advantage=advantage)


@pytest.fixture
def compose(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return load_function("algorithm", f"{file}:curious")


def from_a_source(job, parts, frozen, clock, show):
    """The source of a run, whose rows own as many numbers as the row's number says."""
    inner = make_source(job, parts, frozen, clock, show)

    def next_rows(state, step):
        rows, state, metrics = inner.next_rows(state, step)
        counts = torch.from_numpy(rows.own % 3)
        values = torch.from_numpy(np.repeat(rows.own, rows.own % 3))
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        return rows.declaring(job.algorithm.fields).with_fields(marks=Ragged(values, offsets)), state, metrics

    return inner._replace(next_rows=next_rows)


@pytest.mark.slow
@pytest.mark.gloo
def test_own_fields_are_trained_on_saved_and_replayed(compose, tmp_path):
    settings = SETTINGS | {"save_rollouts": 1, "steps": 1, "save_every": "1", "dtype": "float32", "eval_prompts": 2}
    marks = {"marks": Field("ragged", "source", "the row's number, several times", dtype="int")}
    job = small_job(lambda: with_fields(compose(), marks), mesh="dp2", **settings)

    def program(mesh):
        observer = Quiet(str(tmp_path / "checkpoints"))
        train_loop(job, mesh, observer, from_a_source)
        return observer.steps

    steps = launch(program, job.sizes, "cpu")
    assert all(metrics["curiosity"] > 0 for _, metrics in steps)
    saved = open_rows(tmp_path / "rollouts", 1, job.algorithm.fields)
    rows = read_rows(saved, single(), "scored")
    batch, mask = rows.batch, rows.batch.mask
    surprise = torch.where(mask, -batch.old_logp, 0.0)
    assert torch.equal(batch.curiosity, surprise) and (surprise > 1).any()
    assert torch.equal(batch.surprises.values, surprise[surprise > 1])
    assert batch.surprises.offsets.diff().tolist() == (surprise > 1).sum(1).tolist()
    assert torch.equal(batch.mixed, (saved.table["drawn/score"] - 0.5).abs())
    drawn = read_rows(saved, single()).batch.marks
    assert drawn.offsets.diff().tolist() == [n % 3 for n in range(8)]
    assert drawn.values.tolist() == [n for n in range(8) for _ in range(n % 3)] and drawn.values.dtype == torch.int64
    without = open_rows(tmp_path / "rollouts", 1)  # as a comparison of two runs opens them, which has no algorithm
    assert without.schema["surprises"].kind is FIELDS.extended(job.algorithm.fields)["surprises"].kind
    done = launch(lambda mesh: replay(job, tmp_path, 1, mesh, Quiet()), job.sizes, "cpu")
    assert {"curiosity", "mixed", "surprises"} <= {part.name for part in done[0].differences}
    assert [part.name for step_again in done for part in step_again.differences if not part.agrees(0.0)] == []


def test_an_algorithm_of_own_fields_is_checked_like_any_other(compose):
    algorithm = compose()
    assert set(algorithm.fields) == {"curiosity", "mixed", "surprises"}
    assert {"curiosity", "mixed"} <= reads(algorithm.losses["policy"]).required
    assert "curiosity" not in reads(algorithm).required
    available = {"score", "group", "old_logp"}
    check(algorithm, available)
    check_algorithm(algorithm, without={"compilation"})
    plain = grpo(kl_coef=0.0).advantage
    with pytest.raises(PieceError, match=r"batch.curiosity is missing; it is written by .*made by curiosity\(\)"):
        check(dataclasses.replace(algorithm, advantage=plain), available)
    with pytest.raises(PieceError, match="no field 'curiosity'"):
        check(dataclasses.replace(algorithm, fields={}, advantage=plain), available)
    with pytest.raises(PieceError, match="field 'score' is declared already"):
        dataclasses.replace(algorithm, fields={"score": Field("token", "advantage", "another")})


# ---- ragged fields, between ranks


LENGTHS = np.array([5, 0, 9, 3, 12, 1, 7])
COUNTS = np.array([2, 0, 3, 0, 1, 4, 0])  # values that each row owns
OWNERS = np.array([0, 1, 0, 0, 1, 0, 0])
SIZES = dataclasses.replace(FIELD_KINDS["ragged"], name="sizes")  # a kind that the project does not have
PICTURES = {
    "pictures": Field("ragged", "source", "pictures of the row", dtype="int"),
    "sizes": Field(SIZES, "source", "heights and widths of the pictures"),
}


def with_pictures():
    """Rows that own pictures of bytes, and the heights and widths of these in float64."""
    draw = torch.Generator().manual_seed(0)
    real = torch.arange(16) < torch.from_numpy(LENGTHS)[:, None]
    tokens = torch.where(real, torch.randint(1, 50, real.shape, generator=draw), 0)
    offsets = torch.from_numpy(np.concatenate([[0], COUNTS.cumsum()]))
    pictures = torch.randint(0, 256, (int(COUNTS.sum()), 3, 2, 2), generator=draw, dtype=torch.uint8)
    sizes = torch.rand(int(COUNTS.sum()), 2, generator=draw, dtype=torch.float64)
    batch = declare(Batch(tokens=tokens, mask=real, length=torch.from_numpy(LENGTHS)), PICTURES)
    return batch._replace(pictures=Ragged(pictures, offsets), sizes=Ragged(sizes, offsets))


def assert_same(first, other):
    """The same rows, bit for bit; their padding may differ."""
    fields, schema = as_dict(other), FIELDS.extended(PICTURES)
    assert set(as_dict(first)) == set(fields)
    for name, x in as_dict(first).items():
        width = min(x.shape[1], fields[name].shape[1]) if schema[name].kind.per_token else 0
        pair = [trees.leaves(schema[name].kind.fit(y, width)) for y in (x, fields[name])]
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*pair, strict=True)), name


def own_rows_of(whole, rows):
    """This rank's rows of a batch that has all."""
    return select(whole, torch.from_numpy(rows.own))._replace(length=whole.length)


def travels(mesh, folder):
    whole = with_pictures()
    rows = split_rows(whole, OWNERS, mesh)
    assert_same(rows.batch, own_rows_of(rows_of_all(whole), rows))
    me, to = int(mesh.index(mesh.row_axes)), 1 - OWNERS
    to[2] = OWNERS[2]
    fields = {name: as_dict(rows.batch)[name] for name in PICTURES}
    kinds = {name: field.kind for name, field in PICTURES.items()}
    result = move_rows(fields, LENGTHS, OWNERS, to, mesh, kinds)
    line = 12 + 16  # bytes of a picture and of its sizes
    assert result.sent == line * COUNTS[(me == OWNERS) & (to != me)].sum()
    assert result.received == line * COUNTS[(me != OWNERS) & (to == me)].sum()
    after = moved(rows, to, mesh)
    assert_same(after.batch, own_rows_of(rows_of_all(whole), after))
    order = np.array([6, 0, 0, 5, 2])
    assert_same(take(after, order).batch, expected_of(after, whole, order))
    joined = join_rows([rows, after])
    assert joined.batch.pictures.offsets[-1] == len(joined.batch.pictures.values)
    for piece in own_micro_batches(after, 16):
        here = select(after.batch, piece.rows)  # neighbours in the order of their segments
        assert torch.equal(piece.batch.pictures.values, here.pictures.values)
        assert torch.equal(piece.batch.sizes.offsets, here.sizes.offsets)
    save_rows(folder, after.with_fields(sizes=None), after, {"step": 1, "metrics": {}, "weights": {}})
    gather_objects((), mesh)  # all ranks have written
    saved = open_rows(folder, 1, PICTURES)
    back = read_rows(saved, mesh)
    assert_same(back.batch, own_rows_of(rows_of_all(whole)._replace(sizes=None), back))
    sizes = own_rows_of(rows_of_all(whole), back).sizes
    assert torch.equal(read_rows(saved, mesh, "scored").batch.sizes.values, sizes.values)
    scored = {name: x for name, x in as_dict(after.batch).items() if name != "length"}
    assert [part.name for part in own_differences(after, scored, saved) if part.count] == []
    values = after.batch.sizes.values
    other = scored | {"sizes": after.batch.sizes._replace(values=values + 1)}
    named = [part.name for part in own_differences(after, other, saved) if part.count]
    assert named == (["sizes"] if len(values) else [])
    return True


def rows_of_all(whole):
    return split_rows(whole, np.zeros(len(LENGTHS), dtype=np.int64), single()).batch


def expected_of(rows, whole, order):
    """The rows of an order that this rank has, and the lengths of all."""
    here = order[rows.owner[order] == rows.index]
    return select(rows_of_all(whole), torch.from_numpy(here))._replace(length=whole.length[torch.from_numpy(order)])


@pytest.mark.gloo
def test_ragged_fields_travel_bit_for_bit(tmp_path):
    assert launch(lambda mesh: travels(mesh, tmp_path), parse("dp2"))
    back = read_rows(open_rows(tmp_path, 1, PICTURES), single())  # of two ranks, on one
    assert_same(back.batch, rows_of_all(with_pictures())._replace(sizes=None))
    with pytest.raises(DamagedError, match=r"Field\('sizes'\): the kind is one of row, "):
        open_rows(tmp_path, 1)


@pytest.mark.gloo
def test_ragged_fields_are_handed_over_between_meshes():
    def program(mesh):
        source = view(mesh, parse("tp2"))
        whole = with_pictures()
        owner, to = np.zeros(len(LENGTHS), dtype=np.int64), OWNERS
        rows = split_rows(whole, owner, source)
        after = moved(rows, to, mesh)
        assert_same(after.batch, own_rows_of(rows_of_all(whole), after))
        fields, kinds = {"sizes": rows.batch.sizes}, {"sizes": PICTURES["sizes"].kind}
        assert (
            hand_over(fields, LENGTHS, Owners(owner, source), Owners(to, mesh), kinds).sent == 0
        )  # both ranks have all rows
        return True

    assert launch(program, parse("dp2"))
