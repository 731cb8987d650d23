"""The model's and the loss's collectives under the type checker spmd_types, on one rank of a fake process group.

On each mesh axis a tensor is V (its own value on every rank), I (the same value and gradient on every rank) or R (the
same value, each rank's gradient being a part of the whole). The checker follows types through the forward pass: `psum`
makes V to I, `pbroadcast` I to R, and I meets neither. It looks at no numbers, and into no autograd function: what
happens in that of `linear_logprob`, and in backward passes, only the simulator's tests see.
"""

from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist

from funrl import trees
from funrl.algos.core import needs, token_fraction
from funrl.batch import Batch
from funrl.compiled_kernels import linear_logprob
from funrl.mesh import collectives
from funrl.mesh import mesh as meshes
from funrl.mesh.launch import groups
from funrl.mesh.rules import STORED, layouts, shard
from funrl.models import decoder, value
from funrl.models.config import Config
from funrl.models.scores import token_scores
from funrl.trainer.step import gradient

spmd = pytest.importorskip("spmd_types")
checker = pytest.importorskip("spmd_types.checker")
I, R, V = spmd.I, spmd.R, spmd.V  # noqa: E741
RANK = 1


def config_of(heads, kv_heads, **more):
    more |= {"family": "qwen3", "qk_norm": True, "attention_bias": True, "output_bias": True}
    return Config(vocab=8, embed=4, layers=1, heads=heads, kv_heads=kv_heads, head=4, mlp=8, **more)


FULL = ("tp4", config_of(8, 2))  # key-value heads are replicated: every collective of the model is there
CASES = [FULL, ("tp2", config_of(4, 2)), ("tp2", config_of(2, 2, tied=True)), ("dp2,tp2", config_of(4, 1))]


@pytest.fixture(autouse=True)
def rules(monkeypatch):
    """What the checker is told of the project's own autograd functions."""
    resolve = dist.distributed_c10d._resolve_process_group

    def psum(*, x, group):
        return spmd.rules.all_reduce(x, resolve(group), src=V, dst=I)

    def pbroadcast(*, x, group):
        return spmd.rules.convert(x, resolve(group), src=I, dst=R)

    def head(outputs, *, hidden_TD, unembed_VD, ids_TN):
        spmd.assert_type(hidden_TD, {"tensor": I})
        spmd.assert_type(unembed_VD, {"tensor": V})
        spmd.rules.ignore(ids_TN)
        for out in outputs:
            spmd.assert_type_like(out, hidden_TD)

    functions = {
        collectives._PSum: psum,
        collectives._PBroadcast: pbroadcast,
        linear_logprob._LinearLogprob: head,
    }
    for cls, rule in functions.items():
        monkeypatch.setattr(cls, "spmd_typecheck", staticmethod(rule), raising=False)


@contextmanager
def checked(text):
    """A mesh on a fake process group, and the checker at work."""
    sizes = meshes.parse(text)
    dist.init_process_group("fake", rank=RANK, world_size=meshes.Mesh(sizes).world)
    try:
        mesh = meshes.Mesh(sizes, RANK, groups=groups(sizes))
        names = {axes[0]: spmd.MeshAxis.of(mesh.group(axes)) for axes in mesh.groups if len(axes) == 1}
        with spmd.set_current_mesh(names), checker.typecheck():
            yield mesh
    finally:
        dist.destroy_process_group()


def typed(x, mesh, data, tensor=I):
    kinds = {"data": data, "tensor": tensor}
    return spmd.assert_type(x, {axis: kind for axis, kind in kinds.items() if mesh.sizes[axis] > 1})


def inputs(mesh, config):
    """This rank's weights of a policy and a critic; tokens, positions and segments, the data rank's own; with types."""
    with spmd.no_typecheck():
        policy = decoder.init(config, torch.Generator().manual_seed(0))
        whole = {"policy": policy, "critic": value.init(config, policy)}
        axes = {"policy": decoder.axes(config), "critic": value.axes(config)}
        places = layouts(whole, axes, STORED, mesh.sizes)
        local = trees.map(lambda x: x.clone().requires_grad_(), shard(whole, places, mesh))
        tokens = torch.arange(10).view(2, 5) % config.vocab
        positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]])
        batch = [tokens, positions, torch.tensor([[1, 1, 1, 2, 2], [1, 1, 1, 1, 0]])]
    params = trees.map(lambda x, layout: typed(x, mesh, R, V if layout.axes else I), local, places)
    return params, [typed(x, mesh, V) for x in batch]


def forward(text, config):
    """All outputs are the same on every tensor rank, and so are their gradients; those of data ranks differ."""
    with checked(text) as mesh:
        params, (tokens, *where) = inputs(mesh, config)
        scores = token_scores(config, params["policy"], tokens, *where, mesh=mesh, want=linear_logprob.WANTS)
        for x in (*trees.leaves(scores), value.apply(config, params["critic"], tokens, *where, mesh=mesh)):
            typed(x, mesh, V)


@pytest.mark.parametrize("text,config", CASES)
def test_the_model_type_checks(text, config):
    forward(text, config)


@pytest.mark.parametrize("name,times", [("psum", 0), ("psum", 2), ("pbroadcast", 0), ("pbroadcast", 2)])
def test_any_collective_left_out_or_done_twice_is_found(monkeypatch, name, times):
    collective = getattr(decoder, name)
    calls, wrong = 0, None

    def counted(x, mesh, axes):
        nonlocal calls
        calls += 1
        for _ in range(times if calls - 1 == wrong else 1):
            x = collective(x, mesh, axes)
        return x

    monkeypatch.setattr(decoder, name, counted)
    forward(*FULL)
    total = calls // 2  # of the policy; the critic's are the same
    assert total == {"psum": 3, "pbroadcast": 8}[name]
    for i in range(total):
        calls, wrong = 0, i
        with pytest.raises(spmd.SpmdTypeError):
            forward(*FULL)


@needs()
def mean_logp(logp, batch):
    return (token_fraction(-logp, batch.mask),), {}


@pytest.mark.parametrize("fault", [False, True])
def test_a_gradient_that_is_not_summed_over_data_is_found(monkeypatch, fault):
    text, config = CASES[-1]
    with checked(text) as mesh:
        params, (tokens, *_) = inputs(mesh, config)
        rows = Batch(tokens, tokens > 1, length=tokens.sum(1) * 0 + 5)

        def objective(params, piece, dens):
            fractions, metrics = mean_logp(token_scores(config, params, piece.tokens, mesh=mesh).logp, piece)
            return fractions[0].over(dens[0]), (fractions, metrics)

        def value_and_grad(fn):  # the checker does not follow backward passes: a gradient is its data rank's own
            def run(x, *args):
                grads = trees.map(lambda w: typed(torch.rand(w.shape), mesh, V, V), x)
                return trees.map(torch.detach, fn(x, *args)), grads

            return run

        monkeypatch.setattr(trees, "value_and_grad", value_and_grad)
        if fault:
            monkeypatch.setattr(collectives, "psum", lambda x, mesh, axes: x)
        grads, _, _ = gradient(objective, mean_logp, params["policy"], rows, tokens.float(), mesh, 1 << 10)
        with pytest.raises(spmd.SpmdTypeError, match="expected") if fault else nullcontext():
            for x in trees.leaves(grads):
                spmd.assert_type(x, {"data": I})
