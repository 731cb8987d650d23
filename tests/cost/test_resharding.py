"""The explanation of a plan: its numbers by hand, a large model in seconds, and its errors."""

import json
import os
from xml.etree import ElementTree

import pytest
import torch
from forked_python import run_python

from funrl.cost.resharding import ReshardingRequest, main, resharding_report
from funrl.mesh import rules
from funrl.mesh.mesh import MeshError, parse
from funrl.mesh.plan import lower_bound_bytes, plan, received_bytes
from funrl.models.decoder import weights as decoder_weights
from funrl.models.errors import ModelError
from funrl.models.huggingface.config import config_from_hf

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
LARGE = SMALL | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 80,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def config(tmp_path):
    def write(content):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(content))
        return str(path)

    return write


def explained(model, mesh, generate_mesh, fsdp=False, picture=None):
    return resharding_report(ReshardingRequest(model, mesh, generate_mesh, fsdp=fsdp, picture=picture))


def test_numbers_by_hand(config):
    text = explained(config(SMALL), "dp4,tp2", "dp2,tp4")
    # embed is 256 x 64 x 4 bytes = 65.5 kB: half of it on a device of tp2, a quarter on one of tp4. Of the quarters
    # 0, 1, 2, 3 that ranks 0, 1, 2, 3 need, ranks 0 and 3 have theirs inside the half that they hold; 1 and 2 do not.
    # So in both generate replicas two devices receive a quarter: 4 x 16.4 kB.
    (row,) = [line for line in text.splitlines() if line.startswith("embed")]
    assert row.split("  ")[0] == "embed"
    assert "vocab/tp2 embed" in row and "vocab/tp4 embed" in row
    assert [cell.strip() for cell in row.split("  ") if cell.strip()][-4:] == [
        "32.8 kB",
        "16.4 kB",
        "65.5 kB",
        "pieces",
    ]
    (norm,) = [line for line in text.splitlines() if line.startswith("layers/*/attn_norm x 3")]
    assert norm.endswith("alias") and " 0 B " in norm
    assert "8 devices: train dp4,tp2, generate dp2,tp4" in text


def test_fully_sharded_goes_by_gathers_over_data(config):
    text = explained(config(SMALL), "dp4,tp2", "dp4,tp2", fsdp=True)
    (row,) = [line for line in text.splitlines() if line.startswith("layers/*/mlp/up x 3")]
    assert "mlp/tp2 embed/dp4" in row and row.endswith("gather dp4")


def test_70b_on_512_devices(config):
    text = explained(config(LARGE), "dp64,tp8", "dp32,tp16", fsdp=True)
    assert "70,553.7 M parameters in bfloat16, 512 devices" in text
    assert "moved 5.79 TB; the least possible is 5.79 TB" in text


@pytest.mark.slow
@pytest.mark.parametrize("mesh,generate_mesh", [("dp512", "dp64,tp8"), ("dp64,tp8", "dp512")])
def test_planning_for_512_devices_moves_the_least_and_is_done_once(mesh, generate_mesh):
    config = config_from_hf(LARGE)
    shapes, axes = decoder_weights.shapes(config), decoder_weights.axes(config)
    src = rules.layouts(shapes, axes, rules.fully_sharded(rules.STORED), parse(mesh))
    dst = rules.layouts(shapes, axes, rules.GENERATE, parse(generate_mesh))
    made = plan(src, dst, torch.float16)
    assert plan(src, dst, torch.float16) is made
    assert received_bytes(made) == lower_bound_bytes(made)


def test_the_command_and_its_picture(config, tmp_path):
    picture = tmp_path / "moves.svg"
    words = [f"--model={config(SMALL)}", "--mesh=dp4,tp2", "--generate_mesh=dp2,tp4", f"--picture={picture}"]
    done = run_python(["-m", "funrl.cost.resharding", *words], tmp_path, os.environ)
    assert done.returncode == 0, done.stderr
    assert "the least possible is" in done.stdout
    drawn = ElementTree.fromstring(picture.read_text())
    # Every kind of tensor but the three norms: two arrivals in each half of the ranks, hence four numbers.
    numbers = [x.text for x in drawn.iter("{http://www.w3.org/2000/svg}text") if (x.text or "").isdigit()]
    assert len(numbers) == 8 * 4


@pytest.mark.parametrize(
    "argv, says",
    [
        ([], "--model=DIR_OR_CONFIG is needed; --help lists all flags"),
        (["--model=nowhere"], "--model=nowhere: there is no nowhere"),
        (["--modle=x"], "--modle is not a flag; --help lists all flags"),
        (["dp2"], "'dp2' is not a flag; flags are written --name=value, see --help"),
        (["--model=x", "--dtype=int8"], "--dtype=int8: value should be one of <float64|float32|bfloat16|float16>"),
        (["--model=x", "--ranks_per_node=0"], "--ranks_per_node=0: 0 is not a positive integer"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(argv, says, capsys):
    assert main(["resharding", *argv]) == 2
    said = capsys.readouterr()
    assert (said.err, said.out) == (f"error: {says}\n", "")


def test_help_lists_the_flags(capsys):
    assert main(["resharding", "--help"]) == 0
    said = capsys.readouterr().out
    assert all(flag in said for flag in ("--model", "--generate_mesh", "--[no]fsdp", "--picture"))


def test_errors_name_what_is_wrong(config, tmp_path):
    with pytest.raises(ModelError, match=r"nowhere: there is no .*nowhere"):
        explained(str(tmp_path / "nowhere"), "dp8", "dp8")
    with pytest.raises(MeshError, match=r"embed: the meshes dp8 \(8 devices\) and tp4 \(4 devices\)"):
        explained(config(SMALL), "dp8", "tp4")
    with pytest.raises(MeshError, match="layers/0/attn/o: heads has size 8, which does not divide over tp9"):
        explained(config(SMALL | {"vocab_size": 255}), "tp9", "tp9")
    with pytest.raises(MeshError, match="at most 16 devices, there are 32"):
        explained(config(SMALL), "dp32", "dp16,tp2", picture=str(tmp_path / "x.svg"))
    broken = tmp_path / "config.json"
    broken.write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        explained(str(broken), "dp8", "dp8")
