"""Advantages of every recipe on real ranks: the same bits as on one, for rows that are wider than a block of a sum."""

import hashlib

import numpy as np
import pytest
import torch

from funrl.algos.core import first_signal
from funrl.algos.recipes import NAMES, recipe
from funrl.batch import FIELDS, Batch, as_dict, example, map_fields, with_across
from funrl.mesh.collectives import gather_objects
from funrl.mesh.launch import launch
from funrl.mesh.mesh import parse, single
from funrl.mesh.rows import across, own_rows

B, T, GROUP, ROWS = 24, 640, 4, ("data", "expert")
RECIPES = [name for name in NAMES if recipe(name)().advantage is not None]


def drawn():
    """Float64 fields, whose sums are rounded, of rows of any length; groups of four; ties among scores."""
    rng = np.random.default_rng(3)
    length = torch.from_numpy(rng.integers(12, T + 1, B))
    length[5] = 640
    at, start = torch.arange(T), torch.from_numpy(rng.integers(1, 12, B))[:, None]
    mask = (at >= start) & (at < length[:, None])
    mask[7] = False  # an empty completion
    fixed = {
        "mask": mask, "sampled": mask, "selected": mask & (at % 2 == 0), "length": length,
        "tokens": torch.from_numpy(rng.integers(0, 99, (B, T))), "group": torch.arange(B) // GROUP,
        "score": torch.from_numpy(rng.integers(0, 3, B)).double() / 2, "truncated": length > 600,
        "greedy_score": torch.from_numpy(rng.integers(0, 2, B)).double(),
        "scores": torch.from_numpy(rng.random((B, 2))).double(), "label": mask.double(),
    }  # fmt: skip

    def value(name, like):
        if name in fixed:
            return fixed[name]
        x = torch.from_numpy(rng.standard_normal((B, *((T,) if like.dim() > 1 else ()), *like.shape[2:]))).double()
        x = -x.abs() if name.endswith("logp") else x.abs()
        return torch.where(mask.view(B, T, *(1,) * (x.dim() - 2)), x, 0) if x.dim() > 1 else x

    names = [name for name in as_dict(example()) if name not in ("positions", "segments", "teacher_topk", "imitated")]
    return Batch(**{name: value(name, getattr(example(), name)) for name in names})


def bits(mesh, ranks):
    """Digests of what each recipe's chain makes: of a rank's own rows and of the table."""
    batch, owner = drawn(), np.arange(B) // GROUP % ranks
    own = own_rows(owner, mesh, ROWS)
    width = int(batch.length[own].max()) if len(own) else 8  # ranks differ in their padding
    local = map_fields(lambda name, x: x if FIELDS[name].kind == "row" else x[own][:, :width], batch)
    local = with_across(local, across(owner, mesh, ROWS))
    found = {}
    for name in RECIPES:
        advantage = recipe(name)().advantage
        signal, state = advantage.update(first_signal(local), advantage.init(), local)
        metrics = sorted(signal.metrics.items())
        numbers = repr(state) + "".join(f"{key}{[x.double().item() for x in m]}" for key, m in metrics)
        found[name, "table"] = hashlib.sha256(numbers.encode()).hexdigest()
        made = {"x": signal.x, "mask": signal.mask, "returns": signal.returns, "weight": signal.weight}
        for field, x in (made | {"rows": signal.rows} | signal.extra).items():
            if x is None:
                continue
            for i, row in enumerate(range(len(x)) if x.dim() == 1 else own.tolist()):
                row_bytes = (x[i, : batch.length[row]] if x.dim() > 1 else x[i]).contiguous().numpy().tobytes()
                found[name, field, row] = hashlib.sha256(row_bytes).hexdigest()
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("text,ranks", [("dp2", 2), ("dp4,tp2", 4), ("dp8", 8)])  # of dp8 two ranks have no rows
def test_advantages_are_the_same_bits_on_every_mesh(text, ranks):
    whole = bits(single(), 1)
    assert len({name for name, *_ in whole}) == len(RECIPES) > 15

    def program(mesh):
        return gather_objects(bits(mesh, ranks), mesh)

    seen = set()
    for found in launch(program, parse(text)):
        wrong = sorted({(name, what) for (name, what, *row), x in found.items() if whole[name, what, *row] != x})
        assert not wrong
        seen |= set(found)
    assert seen == set(whole)
