"""The one record of a step: declared fields, reads that are recorded, and every way in which it is run."""

import copy
import pickle
import re

import numpy as np
import pytest
import torch

from funrl import trees
from funrl.across import row_sums
from funrl.batch import (
    TOKEN_INT,
    Batch,
    FieldReads,
    MissingField,
    as_dict,
    declare,
    example,
    recording,
    schema_of,
    select,
    with_rows_spread,
)
from funrl.fields import FIELD_DTYPES, FIELDS, WRITERS, Field
from funrl.kinds import FIELD_KINDS, Ragged, from_row_lines, row_lines


def small():
    return Batch(tokens=torch.arange(6).reshape(2, 3), mask=torch.ones(2, 3, dtype=torch.bool), score=torch.ones(2))


def doubled(x, batch):
    """Reads, replaces, removes and looks for what is not there."""
    batch = batch._replace(advantage=batch.advantage * 2, score=None)
    weight = batch.get("weight")
    assert batch.get("score") is None
    return torch.where(batch.mask, x * batch.advantage if weight is None else weight, x.new_zeros(())).sum()


def test_every_field_is_declared_with_a_kind_and_a_writer():
    assert len(FIELDS) > 30
    for name, field in FIELDS.items():
        assert field.kind is FIELD_KINDS[field.kind.name] and field.writer in WRITERS and field.dtype in FIELD_DTYPES, (
            name
        )
    ragged = {name for name, field in FIELDS.items() if field.kind.name == "ragged"}
    of_rows = {name for name, field in FIELDS.items() if field.kind.of_rows} - ragged
    assert {*FIELDS.rows(), *FIELDS.tokens()} == of_rows and not {*FIELDS.rows()} & {*FIELDS.tokens()}
    assert sorted(sum((FIELDS.by(writer) for writer in WRITERS), ())) == sorted(FIELDS)


def test_the_example_is_what_the_schema_says():
    batch = example()
    B, T = batch.mask.shape
    assert batch.group.tolist() == [0, 0, 1, 1] and set(batch.score.tolist()) == {0.0, 1.0}
    for name, x in as_dict(batch).items():
        field = FIELDS[name]
        integer = TOKEN_INT if field.kind.per_token else torch.int64
        kind = torch.bool if field.dtype == "bool" else integer if field.dtype == "int" else torch.float64
        if isinstance(x, Ragged):
            assert (x.values.dtype, len(x.offsets)) == (kind, B + 1), name
            continue
        shape = {"row": (B,), "wide_row": (B, 2), "token": (B, T), "token_k": (B, T, 2)}[field.kind.name]
        assert (x.dtype, tuple(x.shape)) == (kind, shape), name
    assert example(("mask", "score")).names() == ("mask", "score")


def test_reads():
    batch = small()
    assert batch.score.tolist() == [1, 1] and batch.get("weight") is None
    assert batch._replace(score=None).names() == ("tokens", "mask") and batch.names() == ("tokens", "mask", "score")
    for broken in (lambda: batch.get("scroe"), lambda: batch.scroe):
        with pytest.raises(AttributeError, match="no field 'scroe'; did you mean 'score'"):
            broken()
    with pytest.raises(ValueError, match="no field 'scroe'"):
        Batch(scroe=torch.ones(2))
    with pytest.raises(AttributeError, match=r"immutable: batch._replace\(score=...\)"):
        batch.score = torch.zeros(2)


def test_a_missing_field_says_who_writes_it_and_who_reads_it():
    with pytest.raises(MissingField) as error:
        small().ref_logp  # noqa: B018
    assert error.value.field == "ref_logp"
    line = re.escape(__file__) + r":\d+: small\(\).ref_logp"
    assert re.search(
        rf"batch.ref_logp is missing; it is written by a frozen reference: nats \(read at {line}", str(error.value)
    )
    with pytest.raises(MissingField, match=r"a piece of the advantage chain: .*gae\(\)"):
        small().returns  # noqa: B018


def test_it_is_a_tree_whose_leaves_are_named_by_field():
    batch = Batch(score=torch.ones(2), tokens=torch.zeros(2, 3))
    assert [name for name, _ in trees.named({"rows": batch})] == ["rows/tokens", "rows/score"]
    twice = trees.map(lambda x: 2 * x, batch)
    assert isinstance(twice, Batch) and twice.score.tolist() == [2, 2]
    assert [x.shape for x in trees.leaves(trees.map(torch.add, batch, twice))] == [(2, 3), (2,)]
    assert trees.fill(batch, [1, 2]).score == 2
    assert pickle.loads(pickle.dumps(batch)).score.tolist() == copy.deepcopy(batch).score.tolist() == [1, 1]


OWN = {
    "curiosity": Field("token", "advantage", "nats, how new the token is"),
    "level": Field("row", "judge", "how hard the row is", dtype="int"),
    "pictures": Field("ragged", "source", "pictures of the row"),
}


def test_own_fields_are_declared_with_a_batch_and_stay_with_it():
    batch = declare(small(), OWN)._replace(curiosity=torch.zeros(2, 3), level=torch.tensor([3, 4]))
    batch = batch._replace(pictures=Ragged(torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 3])))
    names = [name for name, _ in trees.named(batch)]
    assert names == ["tokens", "mask", "score", "curiosity", "level", "pictures/values", "pictures/offsets"]
    for other in (trees.map(lambda x: x, batch), pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)):
        assert schema_of(other) == FIELDS | OWN and other.level.tolist() == [3, 4]
    picked = select(batch, torch.tensor([1, 0, 1]))
    assert picked.pictures.offsets.tolist() == [0, 2, 3, 5] and picked.pictures.values[:, 0].tolist() == [2, 4, 0, 2, 4]
    assert with_rows_spread(batch).level.tolist() == [[3, 3, 3], [4, 4, 4]]
    watched, seen = recording(batch)
    assert watched.curiosity.sum() + (watched.get("level") is None) == 0
    assert seen.reads == FieldReads(frozenset({"curiosity"}), frozenset({"level"}))
    compiled = torch.compile(lambda x, b: (x + b.curiosity * b.level[:, None]).sum(), fullgraph=True, backend="eager")
    assert compiled(torch.ones(2, 3), batch._replace(pictures=None)) == 6
    with pytest.raises(MissingField, match="written by the role 'judge': how hard the row is"):
        declare(small(), OWN).level  # noqa: B018
    with pytest.raises(AttributeError, match="no field 'curiosty'; did you mean 'curiosity'"):
        batch.curiosty  # noqa: B018
    with pytest.raises(ValueError, match="no field 'curiosity'"):
        small()._replace(curiosity=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="'score' is declared already: outcome reward"):
        declare(small(), {"score": OWN["level"]})
    for name in ("across", "_level", "two words"):
        with pytest.raises(ValueError, match=f"'{name}' cannot name a field"):
            declare(small(), {name: OWN["level"]})
    tried = example(OWN, FIELDS | OWN)
    assert (tried.curiosity.shape, tried.level.tolist(), len(tried.pictures.offsets)) == ((4, 8), [0, 1, 2, 3], 5)


@pytest.mark.parametrize("kind", [kind for kind in FIELD_KINDS.values() if kind.of_rows], ids=lambda kind: kind.name)
def test_rows_of_every_kind_are_their_lines(kind):
    lengths = np.array([3, 0, 8, 5])
    value = kind.example(lambda shape: torch.arange(float(np.prod(shape))).reshape(shape), 4, 8)
    lines, counts = row_lines(kind, value, lengths), kind.counts(value, lengths)
    back = from_row_lines(kind, lines, counts, 8)
    assert len(lines) == counts.sum() and torch.equal(row_lines(kind, back, lengths), lines)
    order = torch.tensor([2, 2, 0])
    twice = kind.concatenate([kind.select(back, order), kind.select(back, slice(0, 1))])
    parts = lines.split(counts.tolist())
    expected = torch.cat([parts[row] for row in (2, 2, 0, 0)])
    assert torch.equal(row_lines(kind, twice, lengths[[2, 2, 0, 0]]), expected)
    pair = kind.beside(back, torch.tensor([0]), torch.tensor([3]))
    if kind.everywhere:
        assert torch.equal(pair, back[:1])
    else:
        both = torch.cat([kind.lines(kind.select(back, torch.tensor([row]))) for row in (0, 3)])
        assert torch.equal(kind.lines(pair), both)


def test_a_kind_and_a_dtype_that_are_none_are_refused():
    with pytest.raises(ValueError, match=r"Field\('tokn'\): the kind is one of row, wide_row, token"):
        Field("tokn", "advantage", "none")
    with pytest.raises(ValueError, match="the dtype is one of float, int, bool"):
        Field("token", "advantage", "none", dtype="half")


def test_select_takes_rows_of_every_field():
    batch = example()
    picked = select(batch, torch.tensor([2, 0]))
    assert set(picked.names()) == set(batch.names())
    for name, x in as_dict(picked).items():
        expected = batch.get(name)
        if isinstance(x, Ragged):
            start, end = expected.offsets[:-1].tolist(), expected.offsets[1:].tolist()
            rows = [expected.values[start[row] : end[row]] for row in (2, 0)]
            assert torch.equal(x.values, torch.cat(rows)) and x.offsets.diff().tolist() == [len(row) for row in rows]
        else:
            assert torch.equal(x, expected[[2, 0]]), name


def test_eager_torch_func_and_compile_agree():
    batch = small()._replace(advantage=torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    x = torch.linspace(-1, 1, 6).reshape(2, 3)
    leaf = x.clone().requires_grad_()
    (eager,) = torch.autograd.grad(doubled(leaf, batch), leaf)
    assert torch.equal(torch.func.grad(doubled)(x, batch), eager)
    by_row = torch.func.vmap(lambda x, b: doubled(x, b._replace(mask=b.mask)))(x, batch)
    assert torch.allclose(by_row.sum(), doubled(x, batch))
    torch._dynamo.reset()
    compiled = torch.compile(doubled, fullgraph=True, backend="aot_eager")
    value = compiled(leaf, batch)
    assert torch.equal(value, doubled(leaf, batch))
    assert torch.equal(torch.autograd.grad(value, leaf)[0], eager)
    weighted = batch._replace(weight=torch.ones(2, 3))
    assert compiled(leaf, weighted) == 6
    inside = torch.compile(lambda x: Batch(tokens=x, mask=x > 0).mask.sum(), fullgraph=True, backend="eager")
    assert inside(x) == 3


def test_a_recording_batch_tells_required_and_optional_reads():
    watched, seen = recording(example())
    doubled(torch.ones(4, 8), watched)
    assert seen.reads == FieldReads(frozenset({"advantage", "mask"}), frozenset({"weight"}))
    moved = select(watched._replace(score=None, returns=torch.ones(4, 8)), slice(0, 2))
    moved.returns, moved.value  # noqa: B018
    assert seen.reads.required == {"advantage", "mask", "value"}, "what its reader put in is no read of the batch"
    with pytest.raises(MissingField):
        recording(small())[0].old_logp  # noqa: B018
    assert FieldReads(frozenset("a"), frozenset("b")) | FieldReads(frozenset("b")) == FieldReads(frozenset("ab"))
    assert FieldReads(frozenset("ab"), frozenset("c")) - "ac" == FieldReads(frozenset("b"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bits_of_a_rows_sum_depend_on_no_padding(dtype):
    x = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    sums = row_sums(x)
    assert sums.dtype == torch.float64
    torch.testing.assert_close(sums, x.double().sum(1), rtol=1e-13, atol=1e-12)
    assert torch.equal(row_sums(torch.nn.functional.pad(x, (0, 777))), sums)
    assert torch.equal(torch.cat([row_sums(row[None]) for row in x]), sums)
    assert torch.equal(row_sums(x > 0), (x > 0).sum(1).double())


def test_the_kth_largest_of_a_lone_rank():
    x = torch.tensor([[3.0, 1.0], [2.0, 3.0]])
    got = [small().across.kth_largest(x, torch.tensor(k)).item() for k in (1, 2, 3, 4, 9)]
    assert got == [3, 3, 2, 1, 1]
