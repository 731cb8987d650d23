"""Steps of a dense model and of one with experts, at two layers, compiled for chips that are not here."""

import json
import re

import pytest

pytest.importorskip("jax")
pytest.importorskip("libtpu", reason="libtpu has an environment of its own: .ci/setup_libtpu")
import jax
from dry_jobs import plain
from program_counts import equations_of, product_flops, sent_by

from funrl.cli import main as cli
from funrl.cost.ahead import report
from funrl.cost.ahead.report import compile_steps, decoding_plan, engine_passes, rows_of_chips
from funrl.cost.rows import full_rows
from funrl.cost.tracing.hardware import HARDWARE
from funrl.mesh.text import parse
from funrl.xla.ahead import compile_for_chips, topology_mesh, trace_for_chips
from funrl.xla.errors import XlaError

pytestmark = pytest.mark.xla

SIZES = {"num_hidden_layers": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "attention_bias": False, "hidden_act": "silu"}
DENSE = SIZES | {  # those of Qwen3-0.6B
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
    "eos_token_id": 151645,
}
EXPERTS = SIZES | {
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "head_dim": 32,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1024,
    "eos_token_id": 1,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}


@pytest.fixture(autouse=True)
def quick_compiler():
    """A compiler that optimizes as little as it can, which takes two thirds of its time; a user's has its defaults."""
    levels = {name: getattr(jax.config, name) for name in ("jax_optimization_level", "jax_memory_fitting_level")}
    for name in levels:
        jax.config.update(name, "O0")
    yield
    for name, level in levels.items():
        jax.config.update(name, level)


def counts_of(function, args, mesh):
    """Equations of a program with how often each is computed."""
    with jax.enable_x64(True):
        traced, _ = trace_for_chips(function, args, mesh)
    return list(equations_of(traced.jaxpr.jaxpr))


@pytest.mark.slow
def test_a_dense_model_is_compiled(tmp_path, capsys):
    """`funrl compile`: scores, update and decoding, beside the dry run's numbers."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(DENSE))
    words = "grpo --mesh=dp2,tp2 --target=v5e:2x2 --dtype=bfloat16 --token_budget=256 --minibatches=1 --batch_prompts=8"
    words += " --samples_per_prompt=2 --prompt_tokens=256 --max_new_tokens=256"
    assert cli.main(["funrl", "compile", *words.split(), f"--model={file}"]) == 0
    text = capsys.readouterr().out
    rows = [re.split(r"  +", line.strip()) for line in text.splitlines()]
    engine = ["prefill of 2 x 256 tokens", "decoding iteration"]
    names = [*engine, "scores of ref_logp", "gradient of actor", "update of actor"]
    programs = {row[0]: row for row in rows if row[0] in names}
    assert list(programs) == names
    assert programs["gradient of actor"][2] == "374 MB"  # a half of 187M weights in 4 bytes
    assert programs["update of actor"][3:5] == ["1.12 GB"] * 2  # weights and states are donated
    assert "generation on dp4: each engine decodes 4 rows of 2 pages of 256 tokens" in text
    assert [row[0] for row in rows if len(row) == 3][2:] == ["prefill", "decode", "score_reference", "update_policy"]
    findings = re.findall(r"^finding: memory of (\w+)", text, re.MULTILINE)
    assert findings == ["update_policy"], text  # the dry run counts more than is compiled


@pytest.mark.slow
def test_a_model_with_experts_is_compiled(tmp_path, monkeypatch):
    traced = {}

    def compile_and_trace(function, args, mesh, note):
        traced[function.name] = counts_of(function, args, mesh)
        return compile_for_chips(function, args, mesh, note)

    monkeypatch.setattr(report, "compile_for_chips", compile_and_trace)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(EXPERTS))
    given = {"mesh": "dp2,ep2", "generate_mesh": "dp2,tp2", "token_budget": 128}
    hardware = HARDWARE["v6e"]
    job = plain("grpo", hardware.memory, model=str(file), max_new_tokens=64, **given)
    rows = rows_of_chips(job, 128)
    chips = topology_mesh("v6e:2x2", job.sizes)
    phases, _ = compile_steps(job, chips, lambda host, parts: full_rows(host, parts, 64, rows), print)
    assert list(phases) == ["score_reference", "update_policy"]
    _, update = phases["update_policy"]
    assert update.aliased > 0
    kinds = [(x.kind, x.axes) for x in sent_by(traced["gradient of actor"])]
    assert kinds == [
        ("all-gather", ("expert",)),
        ("all-reduce", ("data",)),
        ("all-reduce", ("data", "expert")),
        ("reduce-scatter", ("expert",)),
    ]

    plan = decoding_plan(job, 64, hardware, 0)
    chips = topology_mesh("v6e:2x2", job.generate_sizes)
    function, args = engine_passes(plan, chips)["decode"]
    program, _ = compile_for_chips(function, args, chips, print)
    costs = plan.costs["decode"]
    counts = counts_of(function, args, chips)
    sent = sent_by(counts)
    assert [x[:3] for x in sent] == [
        ("all-gather", ("tensor",), 1),
        ("all-reduce", ("tensor",), 9),
    ]  # four to sample by parts
    ranks = chips.shape["expert"]
    assert sum(product_flops(equation, ranks) * turns for equation, turns in counts) == costs.flops
    assert sum(x.nbytes for x in sent) == sum(x.nbytes for x in costs.traffic.values())
    assert program.aliased >= costs.peak["cache"]  # the pages are written where they are


@pytest.mark.parametrize(
    "target,mesh,says",
    [
        ("h100:8", "dp8", "target 'h100:8' begins with none of v5e, v6e, v5p, such as v5e:4x4"),
        ("v5e:2x2", "dp8", "v5e:2x2 has 4 devices, the mesh has 8"),
        ("v5e:7x9", "dp8", "libtpu does not compile for v5e:7x9"),
    ],
    ids=["kind", "count", "topology"],
)
def test_targets_are_checked(target, mesh, says):
    with pytest.raises(XlaError, match=says):
        topology_mesh(target, parse(mesh))


def test_a_pod_of_the_third_kind_is_known():
    assert topology_mesh("v5p:2x2x1", parse("dp4")).size == 4
