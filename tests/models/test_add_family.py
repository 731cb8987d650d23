"""A family that is a switch is three files by hand: its entry, its note, its test rows; CONTRIBUTING.md says so."""

import pytest
from checkouts import broken_rules, copy_checkout, insert_after, run_in

ENTRY = """    "seed_oss": HFFamily(
        supported=_DENSE,
        fields={"attention_bias": "attention_bias", "output_bias": "attention_out_bias"},
    ),
"""
NOTE = """    "seed_oss": ("bias on q, k and v, and on the output by a field of its own", ""),
"""
ROW = """    "seed_oss": {"model_type": "seed_oss", "head_dim": 8},
    "seed_oss output": {"model_type": "seed_oss", "head_dim": 8, "attention_bias": False, "attention_out_bias": True},
"""


@pytest.mark.slow
def test_a_family_that_is_a_switch_is_three_files(tmp_path):
    folder = copy_checkout(tmp_path)
    code = folder / "funrl/models/huggingface"
    insert_after(folder / "tools/families.py", "NOTES = {", NOTE)
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
