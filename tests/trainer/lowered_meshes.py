"""The gradient of a role on meshes of JAX's CPU devices against torch on one."""

import re

import torch
from jax.sharding import PartitionSpec

from funrl import trees
from funrl.algos.recipes.grpo import grpo
from funrl.batch import Batch
from funrl.compiled_kernels.varlen_attention import segment_offsets
from funrl.mesh.mesh import single
from funrl.mesh.rules import COMPUTE, STORED, Outermost, fully_sharded
from funrl.mesh.text import parse
from funrl.models import decoder_config, decoder_model, place
from funrl.models.decoder.routing import Experts
from funrl.trainer.steps.roles import Role
from funrl.trainer.steps.step import fields_of, gradient
from funrl.xla.layers import as_one_operator
from funrl.xla.meshes import DeviceCopies, MeshProgram, ShardedFunction, devices_of_mesh, spec_of, traced_mesh

TOKENS, SEQUENCES = 48, 5
SIZES = {"vocab": 16, "embed": 8, "layers": 2, "heads": 4, "kv_heads": 2, "head": 4, "mlp": 12, "qk_norm": "head"}
LOSS = grpo(kl_coef=0.05).losses["policy"]
COLLECTIVES = r" (all-reduce|all-gather|reduce-scatter|all-to-all)(?:-start)?\("


def row(seed):
    """The fields of one packed row."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, TOKENS // SEQUENCES, (SEQUENCES,), generator=generator).tolist()
    padding = TOKENS - sum(lengths)
    segments = torch.cat(
        [torch.full((n,), i + 1) for i, n in enumerate(lengths)] + [torch.zeros(padding, dtype=torch.int64)]
    )
    positions = torch.cat([torch.arange(n) for n in (*lengths, padding)])

    def numbers():
        return torch.randn(1, TOKENS, generator=generator, dtype=torch.float64)

    old = 0.3 * numbers() - 3
    return {
        "tokens": torch.randint(0, 16, (1, TOKENS), generator=generator),
        "mask": ((positions > 1) & (segments > 0)).unsqueeze(0),
        "positions": positions.unsqueeze(0),
        "segments": segments.unsqueeze(0),
        "offsets": segment_offsets(segments.unsqueeze(0), SEQUENCES),
        "old_logp": old,
        "ref_logp": old + 0.1 * numbers(),
        "advantage": numbers(),
    }


def role_on(model, mesh, stored, layer=None):
    placed = place(model, mesh, stored, COMPUTE, torch.float64, layer)
    return Role(placed, loss=LOSS)


def difference(text):
    """The largest difference of loss and gradient, and the collectives of the program.

    Args:
      text: a mesh as --mesh has it, with "+fsdp" where weights are fully sharded.
    """
    name, _, kind = text.partition("+")
    sizes = parse(name)
    experts = {"experts": Experts(4, 2, 8)} if sizes["expert"] > 1 else {}
    model = decoder_model(decoder_config(**SIZES | experts))
    stored = fully_sharded(STORED, kind=Outermost) if kind else STORED
    params = model.init(torch.Generator().manual_seed(0), torch.float64)
    rows = [row(seed) for seed in range(sizes["data"] * sizes["expert"])]
    denominators = tuple(map(sum, zip(*(LOSS.denominators(Batch(**fields)) for fields in rows), strict=True)))
    fields_of(LOSS)
    want = gradient(role_on(model, single(), STORED), params, [Batch(**fields) for fields in rows], denominators)

    def make(mesh):
        role = role_on(model, mesh, stored, as_one_operator(model.layer))

        def run(params, fields, denominators):
            result = gradient(role, params, [Batch(**fields)], denominators)
            return result.tree, result.loss

        return run

    every = torch.arange(TOKENS // sizes["sequence"])
    fields = {name: torch.cat([fields[name] for fields in rows]) for name in rows[0]}
    fields["trained"] = every.repeat(len(rows) * sizes["sequence"])
    over = ("data", "expert")
    given = {name: PartitionSpec((*over, "sequence") if name == "trained" else over) for name in fields}
    mesh = traced_mesh(sizes)
    layouts = place(model, mesh, stored, COMPUTE, torch.float64).stored
    specs = trees.map(spec_of, layouts)
    whole = tuple(PartitionSpec() for _ in denominators)
    function = ShardedFunction("gradient", make, lambda *_: (specs, given, whole), lambda *_: (specs, PartitionSpec()))
    program = MeshProgram(function, DeviceCopies(devices_of_mesh(sizes)))
    tree, loss = program(params, fields, denominators)
    gaps = [(x - y).abs().max().item() for x, y in zip(trees.leaves(tree), trees.leaves(want.tree), strict=True)]
    return max(*gaps, abs(loss - want.loss).item()), set(
        re.findall(COLLECTIVES, next(iter(program.compiled.values())).run.as_text())
    )
