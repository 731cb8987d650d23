"""Properties that pieces of several kinds have, each a function of the piece that raises AssertionError."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from funrl import trees
from funrl.algos.core import Signal, reduce, run_piece
from funrl.algos.losses.reductions import token_mean
from funrl.algos.reading import reads
from funrl.batch import Batch, MissingField, as_dict, recording, schema_of
from funrl.testing.awkward_rows import nearby_logp, token_rewards_like, with_padding
from funrl.testing.subjects import (
    Subject,
    advantage_output,
    demand,
    demand_close,
    demand_equal,
    demand_same_numbers,
    gradient_by,
    loss_parts,
    output,
    reduction_parts,
    signal_fields,
)

SINGLE_PRECISION = 2e-4  # tolerance in float32


def in_place(subject: Subject) -> None:
    """Inputs are left as they were."""
    batch = subject.batch()
    logp = nearby_logp(subject.batch())
    signal = subject.signal(batch)
    state = subject.piece.init() if subject.kind == "advantage" else ()
    inputs = {f"batch.{name}": x for name, x in trees.named(as_dict(batch))} | {"x": logp}
    inputs |= {f"signal.{name}": x for name, x in signal._asdict().items() if isinstance(x, Tensor)}
    inputs |= {f"state {i}": x for i, x in enumerate(trees.leaves(state), 1) if isinstance(x, Tensor)}
    before = {name: x.clone() for name, x in inputs.items()}
    watched, _ = recording(batch)  # on which `run_piece` and `run_term` find the line
    if subject.kind == "advantage":
        run_piece(subject.piece, signal, state, watched)
    elif subject.kind == "term":
        reduce(subject.piece, token_mean()).numerators(logp, watched)
    else:
        output(subject, watched, logp)
    for name, x in inputs.items():
        same = x.shape == before[name].shape and torch.equal(x.nan_to_num(), before[name].nan_to_num())
        demand(same, f"it changes its input {name} in place: make a new tensor instead")


def determinism(subject: Subject) -> None:
    """Equal inputs give equal bits, whatever the global random state."""
    outs = []
    for seed in (0, 1):
        batch = subject.batch()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            outs.append(output(subject, batch, nearby_logp(batch)))
    demand_equal(outs[1], outs[0], "when it runs again")


def fields(subject: Subject) -> None:
    """The fields that `reads` finds are enough, and none of the required ones can be missing."""
    batch = subject.batch()
    piece = subject.piece
    logp = nearby_logp(batch)
    needs = reads(piece)
    carried = {"mask", "score"} | ({"weight"} if subject.weighted else set())
    needed = needs.required | needs.optional | carried
    bare = Batch(schema_of(batch), **{k: v for k, v in as_dict(batch).items() if k in needed})
    want = output(subject, batch, logp)
    try:
        got = output(subject, bare, logp)
    except MissingField as error:
        raise AssertionError(
            f"it reads batch.{error.field} here and did not on the example of 4 rows that `reads` runs it on: read "
            "every field at the top of the function, whatever the numbers are"
        ) from error
    demand(set(got) == set(want), f"without other fields it gives {sorted(got)} instead of {sorted(want)}")
    for name, value in want.items():
        demand_close(got[name], value, f"{name} without the fields that it does not read")
    for field in needs.required - {"mask", "score"}:
        try:
            output(subject, batch._replace(**{field: None}), logp)
        except MissingField as error:
            demand(error.field == field, f"without batch.{field} it misses batch.{error.field} first")
            continue
        raise AssertionError(
            f"it reads batch.{field} and does without it: use batch.get({field!r}) for a field that may be missing"
        )


def padding(subject: Subject) -> None:
    """More padding changes nothing."""
    batch = subject.batch()
    logp = nearby_logp(batch)
    wide = with_padding(batch, 4)
    if subject.kind == "advantage":
        signal = subject.signal(batch)
        weight = None if signal.weight is None else pad(signal.weight, (0, 4))
        given = Signal(pad(signal.x, (0, 4)) if subject.tokens else signal.x, wide.mask, weight=weight)
        got = signal_fields(run_piece(subject.piece, given, subject.piece.init(), wide)[0])
        for name, value in signal_fields(advantage_output(subject, batch)).items():
            demand_close(got[name][..., : value.shape[-1]], value, f"{name} with more padding")
    elif subject.kind == "filter":
        demand_equal(output(subject, wide, logp), output(subject, batch, logp), "with more padding")
    elif subject.kind == "reduction":
        values = token_rewards_like(batch)
        dirty = reduction_parts(subject.piece, torch.where(batch.mask, values, torch.nan), batch.mask)
        padded = reduction_parts(subject.piece, pad(values, (0, 3)), pad(batch.mask, (0, 3)))
        for others, when in ((dirty, "where NaN is outside the mask"), (padded, "with more padding")):
            for part, other in zip(reduction_parts(subject.piece, values, batch.mask), others, strict=True):
                demand_close(other.num, part.num, f"the numerator {when}")
                demand_close(other.den, part.den, f"the denominator {when}")
    else:
        for loss in subject.losses():
            demand_same_numbers(loss, (batch, logp), (wide, pad(logp, (0, 4))), "with more padding")


def float32(subject: Subject) -> None:
    """In float32 results are float32, and nearly those of float64; denominators are float64."""
    pairs = []
    for dtype in (torch.float64, torch.float32):
        batch = subject.batch(dtype)
        if subject.kind == "advantage":
            pairs.append([signal_fields(advantage_output(subject, batch))])
            continue
        pairs.append([])
        for loss in subject.losses():
            parts, _ = loss_parts(loss, nearby_logp(batch), batch)
            demand(all(f.num.dtype == dtype for f in parts), f"a numerator of {dtype} input is {parts[0].num.dtype}")
            demand(all(f.den.dtype == torch.float64 for f in parts), "a denominator is not float64")
            pairs[-1].append({f"part {i}": f.value for i, f in enumerate(parts, 1)})
    for exact, single in zip(*pairs, strict=True):
        for name, value in single.items():
            if value.is_floating_point():
                demand(value.dtype == torch.float32, f"{name} of float32 input is {value.dtype}")
                demand_close(value.double(), exact[name].double(), f"{name} in float32", SINGLE_PRECISION)


def compilation(subject: Subject) -> None:
    """`torch.compile(fullgraph=True)` takes it and changes neither values nor gradients."""
    batch = subject.batch()
    torch._dynamo.reset()
    if subject.kind == "advantage":
        signal = subject.signal(batch)
        state = subject.piece.init()

        def step(x: Tensor) -> dict[str, Tensor]:
            return signal_fields(subject.piece.update(signal._replace(x=x), state, batch)[0])

        got = torch.compile(step, fullgraph=True, backend="eager")(signal.x)
        want = step(signal.x)
        demand(set(got) == set(want), f"compiled it gives {sorted(got)} instead of {sorted(want)}")
        for name, value in want.items():
            demand_close(got[name], value, f"{name} compiled")
        return
    loss = subject.losses()[-1]
    results = []

    def update(logp: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        value, metrics = loss(logp, batch)
        return value, {k: m.value for k, m in metrics.items()}

    for run in (update, torch.compile(update, fullgraph=True, backend="eager")):
        leaf = nearby_logp(batch).requires_grad_()
        value, metrics = run(leaf)
        results.append({"the loss": value.detach(), "the gradient": gradient_by(leaf, value), **metrics})
    for name, value in results[0].items():
        demand_close(results[1][name], value, f"{name} compiled")
