"""Steps of a model with dense layers and experts, compiled for chips that are not here."""

import json
import re

import pytest

pytest.importorskip("jax")
pytest.importorskip("libtpu", reason="libtpu has an environment of its own: .ci/setup_libtpu")
import jax

from funrl.cli import main as cli
from funrl.mesh.text import parse
from funrl.xla.ahead import topology_mesh
from funrl.xla.errors import XlaError

pytestmark = pytest.mark.xla

# Every other layer has experts; the last block of the vocabulary is not a whole one.
MODEL = {
    "model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 1024,
    "num_attention_heads": 4, "head_dim": 128, "num_key_value_heads": 2, "vocab_size": 2200,
    "tie_word_embeddings": True, "max_position_embeddings": 1024, "eos_token_id": 1, "moe_intermediate_size": 256,
    "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [], "norm_topk_prob": True, "decoder_sparse_step": 2,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "attention_bias": False, "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture
def quick_compiler():
    """The compiler optimizes as little as it can: two thirds of the time."""
    levels = {name: getattr(jax.config, name) for name in ("jax_optimization_level", "jax_memory_fitting_level")}
    for name in levels:
        jax.config.update(name, "O0")
    yield
    for name, level in levels.items():
        jax.config.update(name, level)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiler")
def test_a_model_of_dense_layers_and_experts_is_compiled(tmp_path, capsys):
    """`funrl compile`: scores, update and decoding, beside the dry run's numbers."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODEL))
    words = "grpo --mesh=ep2,tp2 --generate_mesh=dp2,tp2 --target=v5e:2x2 --dtype=bfloat16 --token_budget=256"
    words += " --minibatches=1 --batch_prompts=8 --samples_per_prompt=2 --prompt_tokens=256 --max_new_tokens=256"
    assert cli.main(["funrl", "compile", *words.split(), f"--model={file}"]) == 0
    text = capsys.readouterr().out
    print(text)
    rows = [re.split(r"  +", line.strip()) for line in text.splitlines()]
    engine = ["prefill of 4 x 256 tokens", "sampling after a prefill", "decoding iteration"]
    names = [*engine, "scores of ref_logp", "gradient of actor", "update of actor"]
    programs = {row[0]: row for row in rows if row[0] in names}
    assert list(programs) == names
    assert programs["gradient of actor"][2] == "10.6 MB"
    assert programs["update of actor"][3:5] == ["31.8 MB"] * 2  # weights and states are donated
    assert "generation on dp2,tp2: each engine decodes 8 rows of 2 pages of 256 tokens" in text
    assert programs["decoding iteration"][4] == "8.91 MB"  # the pages are written where they are
    flops = {row[0]: row[3:] for row in rows if len(row) == 5}
    assert flops["decode"][0] == flops["decode"][1] and flops["prefill"][0] == flops["prefill"][1]
    assert "finding: bytes" not in text and "finding: FLOPs" not in text  # they differ by less than 15 %


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


@pytest.mark.parametrize("target", ["v6e:2x2", "v5p:2x2x1"])
def test_chips_of_the_other_kinds_are_known(target):
    assert topology_mesh(target, parse("dp4")).size == 4
