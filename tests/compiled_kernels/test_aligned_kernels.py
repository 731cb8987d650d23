"""Kernels of a fixed order of sums: interpreted, and compiled for GPUs of two makers."""

import pytest
from kernel_programs import interpreted_test, needs_triton, output_of

CASES = (
    "products_have_the_bits_of_a_row_alone",
    "any_tiles_give_the_same_bits",
    "attention_has_the_bits_of_a_sequence_alone",
    "rows_at_a_time_change_no_bit",
    "gradients_equal_those_of_float64",
    "rows_have_the_bits_of_a_row_alone",
    "scores_have_the_bits_of_sampled_tokens",
    "engine_and_trainer_have_the_same_bits",
    "an_update_has_the_bits_too",
    "fused_decoding_has_the_bits_too",
    "a_trial_finds_no_problem",
    "wrong_kernels_fail_the_trial",
)


test_interpreted_kernels = interpreted_test("interpreted_aligned.py", CASES)


@needs_triton
@pytest.mark.slow
def test_kernels_compile_for_gpus_of_both_makers(tmp_path):
    """No vector register spills, no product is contracted, and every tile has the same instructions for products.

    Attention on CDNA keeps some scalars in lanes of vectors.
    """
    compiled = output_of("compiled_aligned.py", TRITON_CACHE_DIR=str(tmp_path))
    assert len(compiled) == 2 * 20
    assert not [name for name, facts in compiled.items() if facts["spills"]]
    assert not [name for name, facts in compiled.items() if name.startswith("sm_90") and facts["contracted"]]
    kinds = {"sm_90": "wgmma", "gfx942": "v_mfma_f32_32x32x8_bf16"}
    for name, facts in compiled.items():
        gpu, kernel = name.split(" ", 1)
        multiplies = "product" in kernel or "attend" in kernel
        assert set(facts["products"]) == ({kinds[gpu]} if multiplies else set()), name
