"""`funrl compile` of a dense model and of one with experts, at two layers, for chips that are not here."""

import json
import re

import pytest

pytest.importorskip("jax")

from funrl.cli import main as cli
from funrl.xla.ahead import libtpu_problem

pytestmark = pytest.mark.xla

SIZES = {"num_hidden_layers": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "attention_bias": False, "hidden_act": "silu"}
DENSE = SIZES | {  # those of Qwen3-0.6B
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "head_dim": 128,
    "num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 40960,
    "eos_token_id": 151645,
}  # fmt: skip
EXPERTS = SIZES | {
    "model_type": "qwen3_moe", "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": False, "max_position_embeddings": 1024,
    "eos_token_id": 1, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [],
    "norm_topk_prob": True, "decoder_sparse_step": 1,
}  # fmt: skip


def report(config, tmp_path, capsys, words):
    """Rows of the tables of a report, each a list of cells; and its text."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert cli.main(["funrl", "compile", *words.split(), f"--model={file}"]) == 0
    text = capsys.readouterr().out
    return [re.split(r"  +", line.strip()) for line in text.splitlines()], text


@pytest.mark.slow
@pytest.mark.skipif(libtpu_problem() is not None, reason=str(libtpu_problem()))
def test_a_dense_model_is_compiled(tmp_path, capsys):
    words = "grpo --mesh=dp2,tp2 --dtype=bfloat16 --token_budget=1024 --prompt_tokens=128 --max_new_tokens=128"
    rows, text = report(DENSE, tmp_path, capsys, f"{words} --target=v5e:2x2")
    engine = ["prefill of 32 x 128 tokens", "sampling after a prefill", "decoding iteration"]
    names = [*engine, "scores of ref_logp", "scores of old_logp", "gradient of actor", "update of actor"]
    programs = {row[0]: row for row in rows if row[0] in names}
    assert list(programs) == names
    assert programs["gradient of actor"][2] == "374 MB"  # a half of 187M weights in 4 bytes
    phases = {row[0]: row for row in rows if row[0].startswith(("score_", "update_")) and len(row) == 5}
    assert phases["score_reference"][3:] == ["118.3", "112.9"] and phases["update_policy"][3:] == ["450.7", "419"]
    assert ["update_policy", "all-reduce", "dp", "2", "374 MB", "374 MB"] in rows
    assert "generation on dp4: each engine decodes 256 rows of 1 page of 256 tokens" in text
    assert [row[3:] for row in rows if row[0] == "decode"] == [["96.84", "96.84"]]
    filled = "finding: FLOPs of prefill: compiled 559.7 G, dry run 284.8 G (+97%)"  # prompts fill a page
    assert [line for line in text.splitlines() if "FLOPs of" in line] == [filled] and "finding: bytes" not in text


@pytest.mark.slow
@pytest.mark.skipif(libtpu_problem() is not None, reason=str(libtpu_problem()))
@pytest.mark.parametrize("target", ["v6e:2x2", "v5p:2x2x1"])
def test_a_model_with_experts_is_compiled(target, tmp_path, capsys):
    words = "sft --mesh=dp2,ep2 --dtype=float32 --token_budget=256 --text_tokens=64"
    rows, text = report(EXPERTS, tmp_path, capsys, f"{words} --target={target}")
    assert {"gradient of train", "update of train"} <= {row[0] for row in rows}
    kinds = [row[1:3] for row in rows if row[0] == "update_policy" and len(row) == 6]
    assert kinds == [["all-gather", "ep"], ["all-reduce", "dp"], ["all-reduce", "dp,ep"], ["reduce-scatter", "ep"]]
    assert "finding: FLOPs of update_policy: compiled 0.9275 G, dry run 0.585 G (+59%)" in text  # rows are filled up
    assert "finding: bytes" not in text
