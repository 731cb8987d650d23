"""The passes of an engine that are compiled ahead of time: which they are, and what a dry run says of them."""

import math

import pytest

pytest.importorskip("jax")
import jax
import torch
from dry_jobs import plain, small

from funrl import trees
from funrl.cost.ahead import report
from funrl.cost.ahead.report import decoding_plan, decoding_problem, engine_passes
from funrl.cost.tracing.hardware import HARDWARE
from funrl.mesh.mesh import SINGLE
from funrl.models.decoder.gated_delta_net import GatedDeltaNet
from funrl.rollout.native.device.decode_state import DecodeForm, Spare, empty_state
from funrl.trainer.lowered.decoding import XlaBackend
from funrl.xla.ahead import AheadProgram
from funrl.xla.interpret import chains_of
from funrl.xla.meshes import devices_of_mesh

pytestmark = pytest.mark.xla

V5E = HARDWARE["v5e"]


@pytest.mark.parametrize(
    "recipe,flags,says",
    [
        ("sft", {}, "the run does not generate"),
        ("grpo", {"engine": "hf"}, "--engine=hf decodes by itself"),
        ("grpo", {"speculate": 2}, "--speculate drafts tokens on the host"),
        ("grpo", {"place": "train:dp1 generate:dp1"}, "--place gives generation other chips"),
        ("grpo", {}, None),
    ],
    ids=["texts", "engine", "speculate", "place", "none"],
)
def test_what_is_not_compiled_has_a_reason(recipe, flags, says):
    assert decoding_problem(plain(recipe, **flags)) == says


@pytest.fixture(scope="module")
def plan():
    """Of 8 prompts on 2 engines with 2 samples each, and 24 tokens after 8."""
    return decoding_plan(small("grpo", mesh="dp2"), 8, V5E, 0)


def test_the_plan_has_the_rows_and_the_costs_of_the_dry_run(plan):
    assert plan.text == "generation on dp2: each engine decodes 8 rows of 1 page of 256 tokens"
    assert (plan.sizes.prompts, plan.sizes.prompt_tokens) == (4, 8)
    assert plan.weight_bytes == sum(4 * math.prod(x.shape) for x in trees.leaves(plan.weights))
    assert plan.own_bytes == 0  # they are the trainer's
    page = 2 * 2 * 8 * 256 * 4  # keys and values, heads, their size, tokens, bytes of a number
    assert plan.costs["decode"].peak["cache"] == 8 * 2 * page
    assert plan.costs["prefill"].flops > plan.costs["decode"].flops > 0


def test_a_pass_has_memory_beside_the_weights_of_all_roles_and_the_engine_s_own(plan):
    """The engine's weights, arguments of its passes, are the roles' where it has none of its own."""
    program = AheadProgram("decoding iteration", 1.0, plan.weight_bytes + 100, 90, 80, 5, 0)
    prefill = program._replace(arguments=plan.weight_bytes + 60)  # it lacks the unembedding, of 40 bytes
    passes = {"prefill": prefill, "decode": program}
    phases = report.phases_of_engine(plan._replace(own_bytes=7), passes, 1000.0)
    phase = phases["decode"]
    assert phases["prefill"].resident == phase.resident
    assert phase.memory == 1007 + 100 + (90 - 80 + 5)
    assert phase.dry == 1007 + plan.costs["decode"].total - plan.weight_bytes


def operators(program):
    """The operators of a traced program, with the shapes of their results."""
    nodes = [node for node in program.graph.graph.nodes if node.op == "call_function"]
    return [(str(node.target), str(trees.map(lambda x: tuple(x.shape), node.meta["val"]))) for node in nodes]


@pytest.mark.slow
def test_the_iteration_is_the_engine_s():
    """The pass that is compiled ahead has the operators, one by one, of an engine that runs in JAX.

    Every other layer of the model keeps states.
    """
    sizes = {"layers": 4, "mixers": (GatedDeltaNet(2, 4, 8, 6), None) * 2}
    job = small("grpo", decode_rows=4, batch_prompts=2, sizes=sizes)
    plan = decoding_plan(job, 8, V5E, 0)
    mesh = devices_of_mesh(plan.job.generate_sizes)
    function, args = engine_passes(plan, mesh)["decode"]
    with jax.enable_x64(True):
        traced = function.mapped(args, mesh).program

    backend = XlaBackend(SINGLE.sizes, job.model, SINGLE, job.dtype, plan.page_tokens)
    backend.load(job.model.init(torch.Generator().manual_seed(0)))
    backend.resize(4, 4)
    form = DecodeForm(4, 1, ((0, job.sampling),))
    state = empty_state(torch.zeros(5, dtype=torch.int64), len(job.stop), 1)
    backend.decode(state, torch.arange(4), form, Spare(4, 4))
    ((compiled,),) = (program.compiled.values() for program in backend._programs.values())
    own = compiled.program
    assert operators(traced) == operators(own) and len(operators(own)) > 100
    (layers,) = chains_of(own.graph).values()
    assert len(layers.turns) == 2 and not layers.outputs  # one loop, which keeps no copy
