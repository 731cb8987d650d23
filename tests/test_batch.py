"""The one record of a step: declared fields, reads that are recorded, and every way in which it is run."""

import copy
import pickle
import re

import pytest
import torch

from funrl import batch as batches
from funrl import trees
from funrl.across import row_sums
from funrl.batch import (
    FIELD_KINDS,
    FIELDS,
    TOKEN_INT,
    WRITERS,
    Batch,
    MissingField,
    Reads,
    as_dict,
    example,
    recording,
    select,
)


def small():
    return Batch(tokens=torch.arange(6).reshape(2, 3), mask=torch.ones(2, 3, dtype=torch.bool), score=torch.ones(2))


def doubled(x, batch):
    """Reads, replaces, removes and looks for what is not there."""
    batch = batch._replace(advantage=batch.advantage * 2, score=None)
    weight = batch.get("weight")
    assert batch.get("score") is None
    return torch.where(batch.mask, x * batch.advantage if weight is None else weight, x.new_zeros(())).sum()


def test_every_field_is_declared_with_a_kind_and_a_writer():
    assert len(FIELDS) > 30 and list(FIELDS) == list(Batch.__annotations__)
    for name, field in FIELDS.items():
        assert field.kind in FIELD_KINDS and field.writer in WRITERS and field.dtype in ("float", "int", "bool"), name
    kinds = [batches.fields_of_kind(kind) for kind in FIELD_KINDS]
    assert sorted(sum(kinds, ())) == sorted(FIELDS)
    assert set(batches.token_fields()) == set(kinds[1] + kinds[2])
    assert sorted(sum((batches.fields_by(writer) for writer in WRITERS), ())) == sorted(FIELDS)


def test_the_example_is_what_the_schema_says():
    batch = example()
    B, T = batch.mask.shape
    assert batch.group.tolist() == [0, 0, 1, 1] and set(batch.score.tolist()) == {0.0, 1.0}
    for name, x in as_dict(batch).items():
        field = FIELDS[name]
        whole = TOKEN_INT if field.kind.startswith("token") else torch.int64
        kind = torch.bool if field.dtype == "bool" else whole if field.dtype == "int" else torch.float64
        assert x.dtype == kind, name
        assert tuple(x.shape[: min(x.dim(), 2)]) == ((B, T) if field.kind.startswith("token") else x.shape), name
        assert (x.dim() == 3) == (field.kind == "token_k"), name
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


def test_select_takes_rows_of_every_field():
    batch = example()
    picked = select(batch, torch.tensor([2, 0]))
    assert set(picked.names()) == set(batch.names())
    assert all(torch.equal(x, as_dict(batch)[name][[2, 0]]) for name, x in as_dict(picked).items())


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
    assert seen.reads == Reads(frozenset({"advantage", "mask"}), frozenset({"weight"}))
    moved = select(watched._replace(score=None, returns=torch.ones(4, 8)), slice(0, 2))
    moved.returns, moved.value  # noqa: B018
    assert seen.reads.required == {"advantage", "mask", "value"}, "what its reader put in is no read of the batch"
    with pytest.raises(MissingField):
        recording(small())[0].old_logp  # noqa: B018
    assert Reads(frozenset("a"), frozenset("b")) | Reads(frozenset("b")) == Reads(frozenset("ab"))
    assert Reads(frozenset("ab"), frozenset("c")) - "ac" == Reads(frozenset("b"))


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
