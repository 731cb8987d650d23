"""Triton kernels of decoding passes, AdamW and rows of logits: interpreted, compiled for two GPUs, and on one."""

import itertools

import pytest
import torch
from kernel_programs import interpreted_test, needs_triton, output_of

from funrl.compiled_kernels.gpu_kernels.trials import AssumedGPU, assume_kernels, trial_problem
from funrl.optim.fused import adamw_error, fused_adamw, kernel_takes
from funrl.optim.gradients import add_gradients

CASES = (
    "any_pass_equals_float64",
    "caps_and_sinks_equal_float64",
    "sequences_are_computed_by_some_at_a_time",
    "wide_heads_equal_float64",
    "neighbours_change_no_bit",
    "strided_keys_are_written",
    "adamw_equals_torch",
    "leaves_of_any_dtype_are_updated",
    "a_step_in_place_clips_and_applies",
    "wider_copies_are_written",
    "gradients_are_added_in_float32",
    # fused decoding
    "norms_equal_float64",
    "gates_equal_float64",
    "rounded_rows_are_those_of_torch",
    "heads_equal_float64",
    "split_products_equal_float64",
    "first_tokens_equal_float64",
    "tokens_are_those_of_sample_tokens",
    "exact_probabilities_have_the_same_bits",
    "groups_sample_their_own_rows",
    "logits_that_are_not_finite_give_nan",
    "trials_find_no_problem",
    "whole_passes_equal_the_references",
    "launches_are_as_declared",
    "rows_after_the_last_end_are_zeroed",
    # rows of logits
    "sums_equal_float64",
    "blocks_equal_float64",
    "gradients_equal_float64",
    "scores_equal_float64",
    "divergences_equal_float64",
    "vocabulary_is_split",
    "what_is_not_finite_stays_so",
    "operators_keep_their_promises",
    "no_tokens_and_one_input",
    "wrong_kernels_are_found",
)


test_interpreted_kernels = interpreted_test("interpreted_cases.py", CASES)


@pytest.mark.slow
@needs_triton
def test_kernels_compile_for_gpus_of_both_makers(tmp_path):
    """An interpreter takes what a compiler refuses: for warps of 32 and waves of 64, with a vocabulary in sixteens.

    The tiles of prompts may spill, and the cosine of a large angle takes local memory on NVIDIA's.
    """
    compiled = output_of("compiled_pages.py", TRITON_CACHE_DIR=str(tmp_path))
    trials = compiled.pop("trials")
    assert set(trials) == {"_begin", "_heads", "_add_norm", "_gate", "_split_product", "_block_sums", "_sample"}
    names = {"_decode_parts", "_prompt_tiles", "_write", "_zero_tail", "_adamw", "_add"}
    names |= {"_row_sums", "_d_logits", "_divergence_sums", "_divergence_gradients"}
    names |= {*trials, "_round_rows"}
    assert set(compiled) == {f"{gpu} {name}" for gpu in ("sm_90", "gfx942") for name in names}
    narrow = {name for name, x in compiled.items() if not x["wide"]}
    few = {"sm_90 _sample", "gfx942 _gate", "sm_90 _zero_tail", "gfx942 _zero_tail"}
    assert narrow <= few, "they read a block of the vocabulary, few numbers a thread, and the last end"
    spilling = {name for name, x in compiled.items() if x["spills"]}
    assert spilling <= {"gfx942 _prompt_tiles", "sm_90 _begin"}


def test_the_cpu_keeps_torchs_operators():
    leaf = [torch.zeros(3)]
    assert not kernel_takes(leaf, [leaf, leaf, leaf, [0.0]])


def test_the_kernels_take_no_number_of_64_bits():
    """They compute in 32 bits, and have no form for what is wider."""
    leaf, wide = [torch.zeros(3)], [torch.zeros(3, dtype=torch.float64)]
    with assume_kernels(AssumedGPU()):
        assert kernel_takes(leaf, [leaf, leaf, leaf, [0.0]])
        for grads, mu, params in itertools.permutations((wide, leaf, leaf)):
            assert not kernel_takes(grads, [mu, leaf, params, [0.0]])
        total = add_gradients([torch.ones(3)], [torch.ones(3).bfloat16()], wide)
    assert torch.equal(total[0], torch.full((3,), 2.0, dtype=torch.float64))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_updates_by_the_kernel():
    assert trial_problem(adamw_error) is None
    params = {"a": torch.randn(300, 700), "b": torch.randn(5)}
    grads = {name: torch.randn_like(x) for name, x in params.items()}
    adamw = fused_adamw(1e-3, weight_decay=0.1)
    results = []
    for device in ("cpu", "cuda"):
        on = {name: x.to(device) for name, x in params.items()}
        state = adamw.init(on)
        for _ in range(2):
            updates, state = adamw.update({name: x.clone().to(device) for name, x in grads.items()}, state, on)
        results.append(updates)
    for name in params:
        assert torch.allclose(results[0][name], results[1][name].cpu(), rtol=1e-5, atol=1e-9)
