"""A family that is a switch is three files by hand: its fields, its entry, its test row; CONTRIBUTING.md says so."""

import pytest
from checkouts import broken_rules, copy_checkout, insert_after, run_in

FIELDS = '''"""The config.json of Seed-OSS: bias on q, k and v, and on the output by a field of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from funrl.models.decoder.config import Config


def read_seed_oss(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Config` that only this family has."""
    return {"attention_bias": fields["attention_bias"], "output_bias": fields["attention_out_bias"]}


def write_seed_oss(config: Config) -> dict[str, Any]:
    """Fields of config.json that only this family has."""
    attention = config.attention
    return {"attention_bias": attention.bias, "attention_out_bias": attention.output_bias}
'''
ENTRY = """    "seed_oss": HFFamily(
        supported=_DENSE | {"mlp_bias": (False, None)},
        read=seed_oss.read_seed_oss,
        write=seed_oss.write_seed_oss,
    ),
"""
ROW = """    "seed_oss": {"model_type": "seed_oss", "head_dim": 8},
    "seed_oss output": {"model_type": "seed_oss", "head_dim": 8, "attention_bias": False, "attention_out_bias": True},
"""


@pytest.mark.slow
def test_a_family_that_is_a_switch_is_three_files(tmp_path):
    folder = copy_checkout(tmp_path)
    code = folder / "funrl/models/huggingface"
    (code / "configs/seed_oss.py").write_text(FIELDS)
    insert_after(code / "families.py", "    qwen3_next,", "    seed_oss,\n")
    insert_after(code / "families.py", "FAMILIES: Mapping[str, HFFamily] = {", ENTRY)
    insert_after(folder / "tests/family_configs.py", "DENSE = {", ROW)
    run_in(folder, "tools/families.py")
    assert (
        "| `seed_oss` | bias on q, k and v, and on the output by a field of its own |"
        in (folder / "docs/models.md").read_text()
    )
    tests = ("models/test_family_parity.py", "models/test_families_page.py", "rollout/test_engine_families.py")
    words = ("-q", "-p", "no:cacheprovider", "-k", "seed_oss or page", *(f"tests/{file}" for file in tests))
    run_in(folder, "-m", "pytest", *words)
    assert "seed_oss" not in broken_rules(folder)
