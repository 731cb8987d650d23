"""Small jobs whose prompts have pictures."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from small_runs import SIZES, begin, gradients, small_job, whole_batch, whole_weights

from funrl.data.pictures import picture_form, with_picture_form
from funrl.data.tokenizer import END, character_tokenizer
from funrl.kinds import owned_lines
from funrl.models import decoder_config, decoder_model, with_fields
from funrl.models.decoder.routing import Experts
from funrl.models.huggingface.directories import save
from funrl.models.lora import with_lora
from funrl.models.vision.config import PictureLayout, TowerConfig, TowerForm
from funrl.models.vision.grids import picture_patches, picture_tokens
from funrl.models.vision.model import with_vision
from funrl.models.vision.tiles import NO_TILES, Tiles
from funrl.trainer import phases
from funrl.trainer.steps.sync import sync

TOKENS = 16  # of the embedded task's tokenizer
PLACEHOLDER = TOKENS
VOCAB = 24
TOWER = TowerConfig(
    layers=2,
    embed=16,
    heads=2,
    inner=24,
    patch=4,
    window=16,
    whole_layers=(1,),
    placeholder=PLACEHOLDER,
    banned=tuple(range(TOKENS + 1, VOCAB)),
)
FORM = TowerForm(
    norm="layer", gated=False, patch_bias=True, table=3, deep_layers=(0, 1), mean=(0.5,) * 3, std=(0.5,) * 3
)
DEEP_TOWER = dataclasses.replace(TOWER, window=None, whole_layers=(), form=FORM)  # as that of Qwen3-VL
SQUARE_TOWER = dataclasses.replace(  # as that of Gemma 3
    DEEP_TOWER,
    embed=12,
    form=dataclasses.replace(FORM, table=4, deep_layers=(), frames=1, joined=False, rotates=False, merger="mean"),
    layout=PictureLayout(side=4, mutual=True),
)
SQUARE_LAYOUT = PictureLayout(side=4, frame="\n\n", mutual=True)  # with the text of its processor
SQUARE_GRIDS = ((), ((4, 4),), ((4, 4), (4, 4)))
TILED_TOWER = dataclasses.replace(  # as that of LLaVA-OneVision
    SQUARE_TOWER,
    merge=1,
    form=dataclasses.replace(SQUARE_TOWER.form, table=2, merger="plain", idle_norm=True),
    layout=PictureLayout(tiles=Tiles(pixels=9, states=2, canvases=((1, 1), (2, 1), (2, 2)), most=2)),
)
TILED_GRIDS = ((), ((30, 11),), (NO_TILES, NO_TILES), ((20, 40),))  # the last is interpolated
EXPERTS = Experts(count=4, per_token=2, mlp=8)
GRIDS = ((), ((2, 4),), ((6, 2), (2, 2)))  # pictures of prompts, in turn


SPECIAL = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if c.type == 'image' else c.text }}{% endfor %}{% endif %}"
    "{{ '" + END + "' if m.role == 'assistant' else '?' }}{% endfor %}"
)  # of the directory's tokenizer


def save_seeing_model(folder, head=8):
    """Write a directory of a tiny Qwen2.5-VL with heads of a size, whose pictures have 64 to 1,024 pixels."""
    tokenizer = character_tokenizer("abcdefgh ?")
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    pad, video, begin, end = tokenizer.convert_tokens_to_ids(list(SPECIAL))
    sizes = {"embed": 2 * head, "layers": 1, "heads": 2, "kv_heads": 1, "head": head, "mlp": 16, "norm_eps": 1e-6}
    config = decoder_config(
        **sizes,
        vocab=len(tokenizer),
        attention_bias=True,
        rope_axes=tuple(axis for axis in (0, 0, 1, 2) for _ in range(head // 8)),
        max_positions=256,
        eos=(1,),
        pad=0,
        family="qwen2_5_vl",
    )
    tower = TowerConfig(
        layers=1,
        embed=16,
        heads=1,
        inner=16,
        patch=4,
        window=16,
        placeholder=pad,
        banned=(video,),
        begin=begin,
        end=end,
    )
    model = with_vision(decoder_model(config), tower)
    save(folder, model, model.init(torch.Generator().manual_seed(0)), tokenizer)
    (folder / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 64, "max_pixels": 1024}))


GEMMA_MARKS = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
GEMMA_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{{ '<start_of_image>' if c.type == 'image' else c.text }}{% endfor %}{% endif %}"
    "{{ '" + END + "' if m.role == 'assistant' else '?' }}{% endfor %}"
)


def save_square_model(folder):
    """Write a directory of a tiny Gemma 3, whose pictures have 16 x 16 pixels and 4 tokens."""
    tokenizer = character_tokenizer("abcdefgh ?\n")
    tokenizer.add_special_tokens({"additional_special_tokens": list(GEMMA_MARKS)})
    tokenizer.chat_template = GEMMA_TEMPLATE
    begin, placeholder, end = tokenizer.convert_tokens_to_ids(list(GEMMA_MARKS))
    sizes = {"embed": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head": 8, "mlp": 16, "norm_eps": 1e-6}
    config = decoder_config(
        **sizes,
        vocab=len(tokenizer),
        tied=True,
        activation="gelu",
        qk_norm=True,
        norms="sandwich",
        norm_offset=1.0,
        embed_scale=4.0,
        attention_scale=8**-0.5,
        windows=(5, None),
        rope_theta=1e6,
        local_rope_theta=1e4,
        max_positions=256,
        eos=(1,),
        pad=0,
        family="gemma3",
    )
    tower = dataclasses.replace(
        SQUARE_TOWER, placeholder=placeholder, banned=(), begin=begin, end=end, layout=SQUARE_LAYOUT
    )
    model = with_vision(decoder_model(config), tower)
    tokenizer = with_picture_form(tokenizer, picture_form(model.config))
    save(folder, model, model.init(torch.Generator().manual_seed(0)), tokenizer)


def save_tiled_model(folder):
    """Write a directory of a tiny LLaVA-OneVision, whose tiles have 8 x 8 pixels and 4 tokens."""
    tokenizer = character_tokenizer("abcdefgh ?\n")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", "<video>"]})
    tokenizer.chat_template = GEMMA_TEMPLATE.replace(GEMMA_MARKS[0], "<image>")
    placeholder, video = tokenizer.convert_tokens_to_ids(["<image>", "<video>"])
    config = decoder_config(
        **{"embed": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head": 8, "mlp": 16, "norm_eps": 1e-6},
        vocab=len(tokenizer),
        attention_bias=True,
        max_positions=256,
        eos=(1,),
        pad=0,
        family="llava_onevision",
    )
    layout = PictureLayout(tiles=Tiles(pixels=8, states=2, canvases=((1, 1), (2, 1), (1, 3)), most=9))
    tower = dataclasses.replace(TILED_TOWER, placeholder=placeholder, banned=(video,), layout=layout)
    model = with_vision(decoder_model(config), tower)
    tokenizer = with_picture_form(tokenizer, picture_form(model.config))
    save(folder, model, model.init(torch.Generator().manual_seed(0)), tokenizer)


def with_pictures(example, number, grids=GRIDS, tower=TOWER):
    """A prompt whose pictures are before its text."""
    own = grids[number % len(grids)]
    draw = torch.Generator().manual_seed(number)
    count = sum(picture_patches(grid, tower) for grid in own)
    patches = torch.randint(0, 256, (count, 3, 4, 4), generator=draw, dtype=torch.uint8)
    values = {"patches": patches, "grids": torch.tensor(own, dtype=torch.int64).reshape(-1, 2)}
    tokens = [PLACEHOLDER] * sum(picture_tokens(grid, tower) for grid in own) + list(example.tokens)
    return example._replace(tokens=tokens, owned=owned_lines(values))


def picture_job(compose, grids=GRIDS, tower=TOWER, experts=None, adapted=None, **settings: Any):
    """A job of `small_job` with a vision-language model; a third of the prompts have no picture.

    Args:
      adapted: weights that have adapters, by the last parts of their names; None: those of the decoder.
    """
    job = small_job(compose, None, **settings)
    axes = () if tower.layout.mutual or tower.layout.tiles else (0, 1)
    config = with_fields(job.model.config, **SIZES, vocab=VOCAB, rope_axes=axes, max_positions=128)
    if tower.layout.mutual:
        config = with_fields(config, windows=(5, None), local_rope_theta=100.0)
    config = config if experts is None else with_fields(config, experts=experts)
    model = with_vision(decoder_model(config), tower)
    prompts = [with_pictures(e, i, grids, tower) for i, e in enumerate(job.task.prompts[:24])]
    heldout = [with_pictures(e, i, grids, tower) for i, e in enumerate(job.task.heldout)]
    lora = job.lora if adapted is None or job.lora is None else job.lora._replace(targets=adapted)
    learning = {name: item.adapters is not None for name, item in job.models.items()}
    models = {name: with_lora(model, lora) if lora and own else model for name, own in learning.items()}
    task = job.task._replace(prompts=prompts, heldout=heldout)
    return dataclasses.replace(job, model=model, models=models, task=task, lora=lora)


def picture_steps(job, steps, with_gradients=False):
    """A program of one rank: as `small_runs.steps_program`, less the ragged fields in its batches."""

    def program(mesh):
        run, state = begin(job, mesh)
        batches, grads, metrics, counts = [], [], [], []
        for _ in range(steps):
            batch, state, drawn = phases.draw_batch(run, state)
            batch, state, scored = phases.score_batch(run, state, batch)
            counts.append(len(batch.batch.grids.values))
            batches.append(whole_batch(batch.with_fields(patches=None, grids=None)))
            if with_gradients:
                grads.append(gradients(run, state, batch))
            state, learned = phases.learn_batch(run, state, batch)
            state = sync(run.parts, state, frozen=run.frozen)
            metrics.append(drawn | scored | learned)
        weights = whole_weights(run, state)
        return {"batches": batches, "grads": grads, "metrics": metrics, "weights": weights, "pictures": counts}

    return program
