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
from funrl.algos.core import Reduction, reduce
from funrl.batch import Batch
from funrl.compiled_kernels import linear_logprob
from funrl.mesh import collectives
from funrl.mesh import mesh as meshes
from funrl.mesh.rules import shard
from funrl.models import decoder_config, decoder_model, low_rank, place, split_residual, with_value_head
from funrl.models.decoder import attention
from funrl.trainer.steps.roles import Role
from funrl.trainer.steps.step import fields_of, gradient

spmd = pytest.importorskip("spmd_types")
checker = pytest.importorskip("spmd_types.checker")
I, R, V = spmd.I, spmd.R, spmd.V  # noqa: E741
RANK = 1


def config_of(heads, kv_heads, **more):
    more |= {"family": "qwen3", "qk_norm": True, "attention_bias": True, "output_bias": True}
    return decoder_config(vocab=8, embed=4, layers=1, heads=heads, kv_heads=kv_heads, head=4, mlp=8, **more)


FULL = ("tp4", config_of(8, 2))  # key-value heads are replicated: every collective of the model is there
CASES = [FULL, ("tp2", config_of(4, 2)), ("tp2", config_of(2, 2, tied=True)), ("dp2,tp2", config_of(4, 1))]


@pytest.fixture(autouse=True)
def rules(monkeypatch):
    """The checker's types of the project's own autograd functions."""
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
        combinations = meshes.combinations(sizes)
        own = {a: next(ranks for ranks in meshes.members(sizes, a) if RANK in ranks) for a in combinations}
        groups = {axes: dist.new_group(ranks) for axes, ranks in own.items()}
        mesh = meshes.Mesh(sizes, RANK, groups={axes: group.group_name for axes, group in groups.items()})
        names = {axes[0]: spmd.MeshAxis.of(group) for axes, group in groups.items() if len(axes) == 1}
        with spmd.set_current_mesh(names), checker.typecheck():
            yield mesh
    finally:
        dist.destroy_process_group()


def typed(x, mesh, data, tensor=I):
    kinds = {"data": data, "tensor": tensor}
    return spmd.assert_type(x, {axis: kind for axis, kind in kinds.items() if mesh.sizes[axis] > 1})


def inputs(mesh, config):
    """A policy and a critic, this rank's weights of them, and the data rank's own batch; with types."""
    with spmd.no_typecheck():
        models = {"policy": decoder_model(config), "critic": with_value_head(decoder_model(config))}
        placed = {name: place(model, mesh) for name, model in models.items()}
        whole = {name: model.init(torch.Generator().manual_seed(0)) for name, model in models.items()}
        lays = {name: item.stored for name, item in placed.items()}
        local = trees.map(lambda x: x.clone().requires_grad_(), shard(whole, lays, mesh))
        tokens = torch.arange(10).view(2, 5) % config.vocab
        positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]])
        segments = torch.tensor([[1, 1, 1, 2, 2], [1, 1, 1, 1, 0]])
    params = trees.map(lambda x, lay: typed(x, mesh, R, V if lay.axes else I), local, lays)
    fields = {"tokens": tokens, "positions": positions, "segments": segments}
    return placed, params, Batch(**{name: typed(x, mesh, V) for name, x in fields.items()})


def forward(text, config):
    """All outputs are the same on every tensor rank, and so are their gradients; those of data ranks differ."""
    with checked(text) as mesh:
        placed, params, batch = inputs(mesh, config)
        scores = placed["policy"].token_scores(params["policy"], batch, linear_logprob.WANTS)
        for x in (*trees.leaves(scores), placed["critic"].values(params["critic"], batch)):
            typed(x, mesh, V)


@pytest.mark.parametrize("text,config", CASES)
def test_the_model_type_checks(text, config):
    forward(text, config)


@pytest.mark.parametrize("name,times", [("psum", 0), ("psum", 2), ("pbroadcast", 0), ("pbroadcast", 2)])
def test_any_collective_left_out_or_done_twice_is_found(monkeypatch, name, times):
    collective = getattr(attention, name)
    calls, wrong = 0, None

    def counted(x, mesh, axes):
        nonlocal calls
        calls += 1
        for _ in range(times if calls - 1 == wrong else 1):
            x = collective(x, mesh, axes)
        return x

    for module in (attention, low_rank, split_residual):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, counted)
    forward(*FULL)
    total = calls // 2  # of the policy; the critic's are the same
    assert total == {"psum": 3, "pbroadcast": 8}[name]
    for i in range(total):
        calls, wrong = 0, i
        with pytest.raises(spmd.SpmdTypeError):
            forward(*FULL)


TOKEN_MEAN = Reduction(lambda mask, _: (mask.sum(),), lambda loss, mask, _: (loss.sum(),))
LOSS = reduce(lambda logp, _: (-logp, {}), TOKEN_MEAN)
fields_of(LOSS)  # looked for here once, and not while types are checked


@pytest.mark.parametrize("fault", [False, True])
def test_a_gradient_that_is_not_summed_over_data_is_found(monkeypatch, fault):
    text, config = CASES[-1]
    with checked(text) as mesh:
        placed, params, batch = inputs(mesh, config)
        rows = batch._replace(mask=batch.tokens > 1)
        role = Role(placed["policy"], loss=LOSS)

        def value_and_grad(
            fn, _=None
        ):  # the checker does not follow backward passes: a gradient is its data rank's own
            def run(x, *args):
                grads = trees.map(lambda w: typed(torch.rand(w.shape), mesh, V, V), x)
                return trees.map(torch.detach, fn(x, *args)), grads

            return run

        monkeypatch.setattr(trees, "value_and_grad", value_and_grad)
        monkeypatch.setattr(collectives, "start_psum", (lambda x, *_: x) if fault else collectives.psum)
        monkeypatch.setattr(collectives, "wait", lambda x: x)
        grads, *_ = gradient(role, params["policy"], [rows], (torch.tensor(5.0),))
        with pytest.raises(spmd.SpmdTypeError, match="expected") if fault else nullcontext():
            for x in trees.leaves(grads):
                spmd.assert_type(x, {"data": I})
