"""Cases of the kernels of `gpu_kernels` under Triton's interpreter, which interpreted_cases.py runs."""

import torch

from funrl import optim, trees
from funrl.compiled_kernels import paged_attention as dispatch
from funrl.compiled_kernels.gpu_kernels import adamw_kernel, page_kernels, trials
from funrl.compiled_kernels.paged_attention import paged_attention_reference, paging_of
from funrl.models.weight_dtypes import narrow_weight, renew_copies
from funrl.optim import fused, gradients

PAGE = 32
DECODING = [(1, 100), (1, 1), (1, 64), (1, 65)]
PROMPTS = [(5, 100), (40, 40), (33, 65)]
MIXED = [(1, 70), (3, 5), (1, 33), (20, 52)]


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def scene(sequences, heads, kv_heads, size):
    """Queries, keys and values of new tokens, a cache at random, and their places."""
    counts, ends = zip(*sequences, strict=True)
    width = max(-(-end // PAGE) for end in ends) + 1
    pages = width * len(ends)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).view(len(ends), width)
    q, k, v = (draw(sum(counts), n, size, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads)))
    cache = tuple(draw(pages, PAGE, kv_heads, size, seed=i) for i in (5, 6))
    return q, k, v, cache, paging_of(counts, ends, table, PAGE)


def compare(sequences, sizes, window=0, cap=0.0, sinks=None):
    """A pass by the kernels beside the reference in float64."""
    q, k, v, cache, paging = scene(sequences, *sizes)
    own = tuple(x.clone() for x in cache)
    page_kernels.write_pages(k, v, own, paging.places_N)
    got = dispatch.by_triton(q, *own, *paging[2:], window, 0.0, cap=cap, sinks=sinks)
    wide = tuple(x.double() for x in cache)
    options = {"window": window or None, "cap": cap or None, "sinks_H": None if sinks is None else sinks.double()}
    expected = paged_attention_reference(q.double(), k.double(), v.double(), wide, paging, **options)
    assert all(torch.equal(a, b.float()) for a, b in zip(own, wide, strict=True))
    error = (got - expected).abs().max().item()
    assert error < 1e-5, f"differs by {error}: {sequences}, {sizes}, {window}, {cap}"


def any_pass_equals_float64():
    compare(DECODING, (7, 1, 24), window=40)
    compare(MIXED, (7, 1, 24), window=0)


def caps_and_sinks_equal_float64():
    for sequences in (DECODING, PROMPTS):
        compare(sequences, (6, 2, 8), cap=2.0)
        compare(sequences, (6, 2, 8), window=40, sinks=draw(6, seed=9))


def sequences_are_computed_by_some_at_a_time():
    q, _, _, cache, paging = scene(DECODING, 4, 2, 16)
    whole = dispatch.by_triton(q, *cache, *paging[2:], 0, 0.0)
    most = page_kernels.PARTS_BYTES
    page_kernels.PARTS_BYTES = 3 * 4 * 4 * 3 * (16 + 2)  # three sequences of three parts
    try:
        assert torch.equal(dispatch.by_triton(q, *cache, *paging[2:], 0, 0.0), whole)
    finally:
        page_kernels.PARTS_BYTES = most


def wide_heads_equal_float64():
    page_kernels.WIDE_HEAD, before = 8, page_kernels.WIDE_HEAD
    try:
        compare(MIXED, (4, 2, 16))
    finally:
        page_kernels.WIDE_HEAD = before


def neighbours_change_no_bit():
    q, _, _, cache, paging = scene(MIXED, 4, 2, 16)
    whole = dispatch.by_triton(q, *cache, *paging[2:], 0, 0.0)
    offsets = paging.offsets_S1.tolist()
    for s, (count, end) in enumerate(MIXED):
        alone = paging_of([count], [end], paging.table_SP[s : s + 1], PAGE)
        part = slice(offsets[s], offsets[s + 1])
        assert torch.equal(dispatch.by_triton(q[part], *cache, *alone[2:], 0, 0.0), whole[part])


def strided_keys_are_written():
    k, v = draw(5, 3, 2, 8)[:, 1], draw(5, 2, 8, seed=1)
    cache = torch.zeros(4, 16, 2, 8), torch.zeros(4, 16, 2, 8)
    places = torch.tensor([3, 60, 17, 16, 0])
    page_kernels.write_pages(k, v, cache, places)
    for pages, new in zip(cache, (k, v), strict=True):
        expected = torch.zeros(64, 2, 8)
        expected[places] = new
        assert torch.equal(pages.view(64, 2, 8), expected)


def adamw_equals_torch():
    trials._PROBED = "cpu"
    assert trials.trial_problem(fused.adamw_error) is None
    right = adamw_kernel.adamw_leaves
    adamw_kernel.adamw_leaves = lambda x, decays, facts_4, *rest, **named: right(x, decays, 2 * facts_4, *rest, **named)
    try:
        assert "differ by" in trials.trial_problem(fused.adamw_error)
    finally:
        adamw_kernel.adamw_leaves = right


def leaves_of_any_dtype_are_updated():
    params = {"a": draw(3, 700), "b": draw(5, seed=1).bfloat16()}
    grads = {"a": draw(3, 700, seed=2).bfloat16(), "b": draw(5, seed=3).bfloat16()}
    mask = {"a": True, "b": False}
    for mu_dtype in (None, torch.bfloat16):
        updates = []
        for takes in (False, True):
            fused.kernel_takes = lambda *_, takes=takes: takes
            adamw = fused.fused_adamw(lambda count: 0.1 / (1 + count), weight_decay=0.3, mask=mask, mu_dtype=mu_dtype)
            state = adamw.init(params)
            for _ in range(2):
                update, state = adamw.update({name: x.clone() for name, x in grads.items()}, state, params)
            updates.append((update, state["adam"].mu, state["adam"].nu))
        for plain, kernel in zip(*updates, strict=True):
            for name in params:
                assert plain[name].dtype == kernel[name].dtype
                error = (plain[name].double() - kernel[name].double()).abs().max()
                assert error < (1e-2 if mu_dtype else 1e-5) * plain[name].abs().max()


def a_step_in_place_clips_and_applies():
    """Beside `update` and `apply_updates_` by torch's operators, with frozen leaves and a norm above the bound."""
    begin = {"a": draw(3, 700), "b": draw(5, seed=1).bfloat16(), "frozen": draw(4, seed=2), "empty": draw(0, 3)}
    results = []
    for takes in (False, True):
        fused.kernel_takes = lambda *_, takes=takes: takes
        adamw = optim.fused_adamw(lambda count: 0.1 / (1 + count), weight_decay=0.3, mask=optim.matrices)
        learning = optim.masked(adamw, {"a": True, "b": True, "frozen": False, "empty": True})
        optimizer = optim.chain(optim.clip_by_global_norm(1.0, in_place=True), learning)
        params = {name: x.clone() for name, x in begin.items()}
        renew_copies(params, torch.float16)
        state = optimizer.init(params)
        for step in range(3):
            grads = {name: draw(*x.shape, seed=step) for name, x in begin.items()}
            grads["frozen"].zero_()
            params, state = optim.step_(optimizer, grads, state, params, optim.global_norm(grads))
            if takes:  # float16, which the interpreter rounds as a GPU does
                assert torch.equal(narrow_weight(params["a"], torch.float16), params["a"].half())
            renew_copies(params, torch.float16)
            for x in params.values():
                assert torch.equal(narrow_weight(x, torch.float16), x.half())
        moments = state["adamw"]["adam"]
        results.append((params, moments.mu, moments.nu, state["adamw"]["learning_rate"].count))
    for plain, kernel in zip(*map(trees.leaves, results), strict=True):
        # The interpreter cuts bfloat16 off, where a GPU rounds to the nearest: one last place a step.
        torch.testing.assert_close(plain, kernel, rtol=0.03 if plain.dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    assert torch.equal(results[1][0]["frozen"], begin["frozen"]) and not torch.equal(results[1][0]["b"], begin["b"])


def wider_copies_are_written():
    fused.kernel_takes = lambda *_: True
    params = {"a": draw(3, 700), "b": draw(5, seed=1)}
    renew_copies(params, torch.float64)
    adamw = optim.fused_adamw(0.1)
    grads = trees.map(torch.ones_like, params)
    params, _ = optim.step_(adamw, grads, adamw.init(params), params, optim.global_norm(grads))
    for x in params.values():
        copy = narrow_weight(x, torch.float64)
        assert copy is not x and torch.equal(copy, x.double())


def gradients_are_added_in_float32():
    assert trials.trial_problem(gradients.gradient_sum_error) is None
    sizes = {"a": 2100, "b": 5, "half": 48, "empty": 0}
    params = {name: torch.zeros(n) for name, n in sizes.items()} | {"half": torch.zeros(48).bfloat16()}
    grads = [
        {name: draw(*x.shape, seed=seed).bfloat16() for name, x in params.items()} | {"b": draw(5, seed=seed)}
        for seed in range(3)
    ]
    totals = []
    for takes in (False, True):
        gradients.kernels_take = lambda *_, takes=takes: takes
        total = grads[0]
        for more in grads[1:]:
            total = gradients.add_gradients({**total, "half": total["half"].clone()}, more, params)
        totals.append(total)
    for name in ("a", "b", "empty"):
        assert totals[1][name].dtype == torch.float32 and torch.equal(totals[0][name], totals[1][name])
    torch.testing.assert_close(totals[0]["half"], totals[1]["half"], rtol=0.03, atol=1e-2)


CASES = (
    any_pass_equals_float64,
    caps_and_sinks_equal_float64,
    sequences_are_computed_by_some_at_a_time,
    wide_heads_equal_float64,
    neighbours_change_no_bit,
    strided_keys_are_written,
    adamw_equals_torch,
    leaves_of_any_dtype_are_updated,
    a_step_in_place_clips_and_applies,
    wider_copies_are_written,
    gradients_are_added_in_float32,
)


def set_up():
    """Split a sequence in two parts."""
    page_kernels.PART = 64
