"""The tower, patches and their moves in a dry run, beside what a step and an engine compute."""

import json

import pytest
import torch
from dry_jobs import CPU, H100, plain
from selection import quick
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from funrl.cost import dry_run
from funrl.cost.dry_run import left_out
from funrl.cost.rows import (
    assumed_prompt,
    encode_pictures,
    full_rows,
    leading_tokens,
    owned_bytes,
    row_grids,
    with_assumed_pictures,
    with_owned_bytes,
)
from funrl.cost.tracing.estimate import MOVE, MOVES, tracer_of
from funrl.kinds import owned_lines
from funrl.mesh.mesh import single
from funrl.models.vision.grids import picture_patches, picture_tokens
from funrl.models.vision.inputs import GRIDS, PATCHES
from funrl.models.vision.tiles import NO_TILES
from funrl.trainer.jobs import datasets
from funrl.trainer.jobs.build import build
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.steps.step_rows import with_owned

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 1e4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER = {
    "depth": 4,
    "hidden_size": 48,
    "intermediate_size": 96,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_heads": 2,
    "in_channels": 3,
    "out_hidden_size": 32,
}
TOKENS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
FAMILIES = {
    "qwen2_5_vl": {
        **TEXT,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
        "vision_config": TOWER | {"hidden_act": "silu", "window_size": 64, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        "text_config": TEXT
        | {
            "head_dim": 16,
            "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        "vision_config": TOWER
        | {"hidden_act": "gelu_pytorch_tanh", "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]},
    },
    "gemma3": {
        "text_config": TEXT
        | {
            "head_dim": 16,
            "sliding_window": 16,
            "query_pre_attn_scalar": 16,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "vision_config": {
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "image_size": 128,
            "patch_size": 8,
            "vision_use_head": False,
        },
        "mm_tokens_per_image": 64,
        "image_token_index": 90,
        "boi_token_index": 92,
        "eoi_token_index": 93,
    },
    "llava_onevision": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": {
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "image_size": 42,
            "patch_size": 8,
            "vision_use_head": False,
        },
        "image_token_index": 90,
        "video_token_index": 91,
        "image_grid_pinpoints": [[42, 42], [42, 84], [84, 126]],
        "vision_aspect_ratio": "anyres_max_9",
    },
}
CLASSES = {
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "llava_onevision": "LlavaOnevisionForConditionalGeneration",
}


@pytest.fixture
def folder(request, tmp_path):
    """The directory of a small model without weights."""
    raw = {"model_type": request.param, "architectures": [CLASSES[request.param]], **TOKENS, **FAMILIES[request.param]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 256, "max_pixels": 128 * 128}))
    return str(tmp_path)


def own_job(folder, algorithm="grpo", **given):
    return plain(algorithm, model=folder, dry_run=True, hardware="cpu", **given)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["llava_onevision"], indirect=True)
def test_an_engine_does_the_flops_of_a_tower_once_a_prompt(folder):
    """torch counts the products of a tower that computes, with attention as plain products."""
    tokens = 80
    job = own_job(folder)
    grids = row_grids(job, tokens)
    tower = job.model.config.tower
    assert grids == ((42, 42),)  # an overview and a tile, each of 25 tokens, and 5 ends of lines
    seen = picture_tokens(grids[0], tower)
    patches = picture_patches(grids[0], tower)
    request = assumed_prompt(job, tokens)
    params = job.model.init(torch.Generator().manual_seed(0))
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        encode_pictures(job.model, params, request)
    flops = counter.get_total_flops()
    assert flops > 1e6
    given = {"samples_per_prompt": 8}
    estimates = [dry_run.estimate(own_job(folder, assume_pictures=count, **given), tokens, CPU) for count in (0, 1)]
    without, with_one = (estimate.phases["generate"] for estimate in estimates)
    prompts = job.settings.run.batch_prompts
    assert with_one.flops - without.flops == pytest.approx(prompts * flops, rel=0.01)
    held = with_one.peak["cache"] - without.peak["cache"]
    layers = 1 + len(tower.form.deep_layers)
    assert held >= (prompts - 1) * layers * seen * job.model.config.embed * 4
    assert f"with 1 picture of {patches} patches" in estimates[1].step and "picture" not in estimates[0].step


def seen_rows(job, parts, tokens, count):
    """Rows of random pixels as the source makes them."""
    rows = full_rows(job, parts, tokens, count)
    tower = job.model.config.tower
    grids = row_grids(job, tokens)
    ids = rows.batch.tokens.clone()
    ids[ids == tower.placeholder] = 3
    first = torch.tensor(leading_tokens(tower, grids), dtype=ids.dtype)
    ids[:, : len(first)] = first
    count = sum(picture_patches(grid, tower) for grid in grids)
    patches = torch.randint(0, 256, (count, 3, tower.patch, tower.patch), dtype=torch.uint8)
    own = owned_lines({PATCHES: patches, GRIDS: torch.tensor(grids)})
    return with_owned(rows.with_fields(tokens=ids), [own] * len(rows.own), job.model.owned.none)


def pretended_step(job, tokens, count):
    """The trace of a step on rows with assumed pictures."""
    parts = with_assumed_pictures(job, build(job, single(), lambda _: None), tokens)
    return dry_run.trace_step(job, parts, full_rows(job, parts, tokens, count), tracer_of(job, parts, CPU))


ALONE = {"verify_sync": False}  # rows own their pictures alone, no digests
STEPS = {
    "frozen": ("grpo", ALONE),
    "remat": ("grpo", {"freeze": "none", "remat": "full", **ALONE}),
    "demonstrations": ("sft", {}),
    "critic": ("ppo", {"minibatches": 2, **ALONE}),
}


OF_FAMILIES = [
    *(("qwen2_5_vl", case) for case in STEPS if case != "critic"),
    ("qwen3_vl", "frozen"),
    ("gemma3", "frozen"),
    ("llava_onevision", "critic"),
]
QUICK = [("qwen2_5_vl", "frozen"), ("qwen2_5_vl", "remat")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "case"),
    [pytest.param(*both, marks=[] if both in QUICK else pytest.mark.slow) for both in OF_FAMILIES],
    indirect=["folder"],
)
def test_a_pretended_step_holds_and_computes_what_a_real_one_does(case, folder):
    algorithm, given = STEPS[case]
    tokens, count = 80, 8
    job = own_job(folder, algorithm, token_budget=512, **given)
    parts = build(job, single(), lambda _: None)
    rows = seen_rows(job, parts, tokens, count)
    real = dry_run.trace_step(job, parts, rows, tracer_of(job, parts, CPU, real=True))
    fake = pretended_step(job, tokens, count)
    own = owned_bytes(job, tokens)
    patches = sum(picture_patches(grid, job.model.config.tower) for grid in row_grids(job, tokens))
    assert sum(own) == patches * 3 * 8 * 8 + 2 * 8
    assert fake.row_bytes + sum(own) == pytest.approx(real.row_bytes, rel=1e-3, abs=18)  # offsets of two fields
    phases = with_owned_bytes(fake.phases, sum(own), count)
    assert set(phases) == set(real.phases)
    for name, costs in real.phases.items():
        assert phases[name].flops == pytest.approx(costs.flops, rel=1e-6), name
        assert phases[name].total == pytest.approx(costs.total, rel=0.05), name


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["qwen2_5_vl"], indirect=True)
def test_a_frozen_tower_has_no_backward_pass(folder):
    """Of a product, a weight that learns takes another one of its size, and an input that learns too."""
    rows, tokens = 4, 80
    flops = {}
    for freeze in ("vision", "none"):
        for count in (0, 1):
            phases = pretended_step(own_job(folder, freeze=freeze, assume_pictures=count), tokens, rows).phases
            flops[freeze, count] = phases["update_policy"].flops, phases["score_reference"].flops
    (frozen, forward), (learning, _) = (
        (more - less for more, less in zip(flops[freeze, 1], flops[freeze, 0], strict=True))
        for freeze in ("vision", "none")
    )
    assert forward < frozen < 1.6 * forward  # and the backward pass of the projector
    assert 2.5 * forward < learning < 3.3 * forward


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp2", "sp2"])
def test_patches_move_with_rows_and_lie_on_every_rank_of_a_replica(mesh):
    """Task pictures of 16 patches of 8 x 8 pixels. Ranks that share a row's tokens compute the tower of whole rows."""
    own = {"dp2": 8, "sp2": 16}[mesh]  # rows of a rank
    row = 16 * 3 * 8 * 8 + 2 * 8
    flags = {"task": "shapes", "dry_run": True, "hardware": "cpu", "batch_prompts": 8, "samples_per_prompt": 2, **ALONE}
    no, yes = ({"assume_pictures": 0}, {})
    blind, seeing = (
        dry_run.estimate(plain("grpo", **flags, **given, mesh=mesh), 11, CPU).phases for given in (no, yes)
    )
    assert seeing["advantage"].peak["batch"] - blind["advantage"].peak["batch"] == own * row
    before, after = (
        next(t for (op, _), t in phases[MOVES[0]].traffic.items() if op == MOVE) for phases in (blind, seeing)
    )
    sent = {"dp2": 5, "sp2": 8}[mesh]  # to balance, and the half that the other rank has generated
    assert after.nbytes - before.nbytes == sent * row and after.count == 3 * before.count
    alone = [
        pretended_step(plain("grpo", **flags, **given), 11, own).phases["score_reference"].flops for given in (no, yes)
    ]
    of_tower = seeing["score_reference"].flops - blind["score_reference"].flops
    assert of_tower == pytest.approx(alone[1] - alone[0])


@pytest.mark.parametrize("folder", quick(("qwen2_5_vl", "qwen3_vl"), ["qwen2_5_vl"]), indirect=True)
def test_pictures_are_bounded_by_pixels_and_by_the_row(folder):
    assert row_grids(own_job(folder), 2000) == ((16, 16),)
    assert row_grids(own_job(folder, max_pixels=64 * 96), 2000) == ((8, 12),)
    assert row_grids(own_job(folder, max_pixels=64 * 64), 2000) == ((8, 8),)
    assert row_grids(own_job(folder, assume_pictures=3), 2000) == ((16, 16),) * 3
    assert row_grids(own_job(folder, assume_pictures=3), 64) == ((6, 12),) * 3  # of at most 19 tokens, with 2 around
    assert row_grids(own_job(folder, assume_pictures=0), 2000) == ()
    assert row_grids(own_job(folder, "dpo"), 2000) == ()
    with pytest.raises(SettingsError, match="--prompt_tokens=8: 3 pictures take 9 tokens or more; give a larger"):
        row_grids(own_job(folder, assume_pictures=3), 8)
    with pytest.raises(SettingsError, match="--assume_pictures=1 does nothing without prompts or demonstrations"):
        row_grids(own_job(folder, "dpo", assume_pictures=1), 80)


@pytest.mark.parametrize("folder", ["gemma3"], indirect=True)
def test_pictures_of_one_size_are_not_bounded_by_the_row(folder):
    assert row_grids(own_job(folder, assume_pictures=3), 2000) == ((16, 16),) * 3
    with pytest.raises(SettingsError, match="--prompt_tokens=150: 3 pictures take 198 tokens or more; give a larger"):
        row_grids(own_job(folder, assume_pictures=3), 150)


@pytest.mark.parametrize("folder", ["llava_onevision"], indirect=True)
def test_a_picture_alone_fills_the_largest_canvas_and_several_are_overviews(folder):
    assert row_grids(own_job(folder), 2000) == ((84, 126),)
    assert row_grids(own_job(folder), 60) == ((42, 42),)  # 25 tokens, and 5 lines of 6: two tiles would take 80
    assert row_grids(own_job(folder, assume_pictures=3), 2000) == (NO_TILES,) * 3
    with pytest.raises(SettingsError, match="--prompt_tokens=70: 3 pictures take 78 tokens or more; give a larger"):
        row_grids(own_job(folder, assume_pictures=3), 70)


def test_flags_of_pictures_are_refused_where_the_model_reads_text():
    with pytest.raises(SettingsError, match="--assume_pictures=1 does nothing without a model that sees"):
        plain("grpo", dry_run=True, assume_pictures=1)
    with pytest.raises(SettingsError, match="--max_pixels=4096 does nothing without a model that sees"):
        plain("grpo", dry_run=True, max_pixels=4096)


@pytest.mark.parametrize("algorithm", quick(["grpo", "sft"], ["grpo"]))
def test_pictures_of_the_task_are_its_own(algorithm, monkeypatch):
    monkeypatch.setattr(datasets, "TEXTS", 16)
    job = plain(algorithm, task="shapes", seed=16, eval_prompts=2)  # no other test keeps texts of this seed
    tokens = {"grpo": 11, "sft": 13}[algorithm]
    assert dry_run.tokens_of(job.settings, job.algorithm) == tokens and row_grids(job, tokens) == ((4, 4),)


def test_what_is_not_counted_is_said():
    read = "reading and resizing pictures"
    seeing, blind = plain("grpo", task="shapes"), plain("grpo")
    assert all(read in left_out(seeing, None, x) and read not in left_out(blind, None, x) for x in (CPU, H100))
