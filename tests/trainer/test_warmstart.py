"""The supervised warm start: what it learns, its cache, and weights from a directory."""

import dataclasses
import functools
import json
import os
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import SIZES, Quiet, begin, gap, small_job

from funrl import trees
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.mesh.reshard import unshard
from funrl.models import decoder_model, with_fields
from funrl.models.huggingface import directories as hf
from funrl.tasks import arithmetic
from funrl.trainer.jobs import warmstart
from funrl.trainer.jobs.build import build
from funrl.trainer.settings.settings import with_flags


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache of its own for every test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "funrl" / "warmstart"


def start(job):
    """Whole weights after `initial_weights` on the job's mesh, as rank 0 ends with them, and what was shown."""

    def program(mesh):
        placed, show = build(job, mesh, print).begin, Quiet()
        weights = warmstart.initial_weights(job, placed, show)
        return unshard(weights, placed.stored, mesh), show

    return launch(program, job.sizes, "cpu")


def taken(show):
    return any("taken from the cache" in note for note in show.notes)


def test_demonstrations_are_masked_to_their_answers_and_stop_tokens():
    job = small_job(seed=3)
    rows = warmstart.demonstration_batch(job, 7, torch.device("cpu"))
    pairs = arithmetic.demonstrations(3 * 1_000_003 + 7, warmstart.BATCH)
    assert len(rows.tokens) == len(pairs)
    for i, (prompt, answer) in enumerate(pairs):
        tokens, mask = rows.tokens[i], rows.mask[i]
        assert int(rows.length[i]) == len(prompt) + len(answer) + 1
        assert job.tokenizer.decode(tokens[: len(prompt)].tolist()) == prompt
        assert job.tokenizer.decode(tokens[mask].tolist()) == answer + job.tokenizer.eos_token
    assert not torch.equal(rows.tokens, warmstart.demonstration_batch(job, 8, torch.device("cpu")).tokens)


def test_the_loss_falls_from_that_of_guessing():
    _, show = start(small_job(warmstart_steps=60, dtype="float32"))
    steps, losses = zip(*show.losses, strict=True)
    assert steps == (10, 20, 30, 40, 50, 60)
    assert 2.0 < losses[0] < 2.8  # ln 16 = 2.77 nats is a guess among all tokens
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.gloo
@pytest.mark.parametrize("mesh", ["dp2,tp2", "dp4"])
def test_the_same_weights_on_every_mesh_and_without_the_cache(mesh, cache, monkeypatch):
    one, _ = start(small_job(warmstart_steps=12))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "another"))
    other, show = start(small_job(warmstart_steps=12, mesh=mesh))
    assert not taken(show)
    assert gap(other, one) == 0


@pytest.mark.gloo
def test_a_second_run_takes_the_cache_on_any_mesh():
    one, first = start(small_job(warmstart_steps=5))
    assert not taken(first)
    for mesh in ("dp1", "dp2,tp2", "tp2"):
        other, show = start(small_job(warmstart_steps=5, mesh=mesh))
        assert taken(show) and not show.losses
        for a, b in zip(trees.leaves(other), trees.leaves(one), strict=True):
            assert torch.equal(a, b)


def test_the_cache_is_of_one_model_seed_length_and_dtype():
    start(small_job(warmstart_steps=3))
    for other in ({"seed": 1}, {"warmstart_steps": 4}, {"dtype": "float32"}, {"sizes": SIZES | {"mlp": 24}}):
        assert not taken(start(small_job(**{"warmstart_steps": 3} | other))[1]), other
    for same in ({}, {"lr": 0.5}, {"max_new_tokens": 5}, {"batch_prompts": 6}):
        assert taken(start(small_job(**{"warmstart_steps": 3} | same))[1]), same


def cut(file, share):
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])


def hole(file):
    """Zeros instead of the first half, as a power cut leaves them."""
    data = file.read_bytes()
    file.write_bytes(bytes(len(data) // 2) + data[len(data) // 2 :])


def another_model(folder):
    model = decoder_model(with_fields(small_job().model.config, mlp=24))
    hf.save(folder, model, model.init(torch.Generator().manual_seed(0)))


def shifted(file):
    """The right names, shapes and size, but a tensor that lies behind the end of its place."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    first = min((k for k in table if k != "__metadata__"), key=lambda k: table[k]["data_offsets"])
    table[first]["data_offsets"][0] += 4
    text = json.dumps(table, separators=(",", ":")).encode().ljust(length)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def flipped(file):
    """One bit, in the middle of the weights."""
    data = file.read_bytes()
    middle = len(data) * 3 // 4
    file.write_bytes(data[:middle] + bytes([data[middle] ^ 16]) + data[middle + 1 :])


def odd_config(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


DAMAGES = {
    "a bit flipped": lambda folder: flipped(folder / hf.WHOLE),
    "no checksum": lambda folder: (folder / "sha256").unlink(),
    "a config of odd types": lambda folder: odd_config(folder, hidden_size=[None], num_attention_heads={}),
    "a config of absurd sizes": lambda folder: odd_config(folder, vocab_size=10**18, num_hidden_layers=10**9),
    "a config nested deeply": lambda folder: (folder / "config.json").write_text("[" * 100_000),
    "weights cut short": lambda folder: cut(folder / hf.WHOLE, 0.5),
    "weights cut inside their table": lambda folder: cut(folder / hf.WHOLE, 0.01),
    "weights empty": lambda folder: cut(folder / hf.WHOLE, 0),
    "weights zero": lambda folder: hole(folder / hf.WHOLE),
    "weights shifted": lambda folder: shifted(folder / hf.WHOLE),
    "no weights": lambda folder: (folder / hf.WHOLE).unlink(),
    "config cut short": lambda folder: cut(folder / "config.json", 0.5),
    "config empty": lambda folder: cut(folder / "config.json", 0),
    "config an empty object": lambda folder: (folder / "config.json").write_text("{}"),
    "config zero": lambda folder: hole(folder / "config.json"),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "another model": another_model,
    "an empty folder": lambda folder: [file.unlink() for file in folder.iterdir()],
    "a file in its place": lambda folder: (shutil.rmtree(folder), folder.write_text("")),
    "a link to nothing in its place": lambda folder: (shutil.rmtree(folder), folder.symlink_to("nowhere")),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_cache_is_said_and_made_again(damage, cache):
    job = small_job(warmstart_steps=3)
    one, _ = start(job)
    (stored,) = cache.iterdir()
    damage(stored)
    again, show = start(job)
    assert not taken(show)
    assert sum(f"the cached warm start in {stored} is damaged (" in note for note in show.notes) == 1
    assert "it is made again" in show.notes[0] and "\n" not in show.notes[0]
    assert gap(again, one) == 0
    assert list(cache.iterdir()) == [stored]  # neither a draft nor the damaged one is left
    healed, show = start(job)
    assert taken(show) and gap(healed, one) == 0


@pytest.mark.gloo
@pytest.mark.parametrize("reader", ["load_model", "read_part"])
def test_a_cache_that_one_rank_cannot_read_is_taken_by_none(reader, cache, monkeypatch):
    job = small_job(warmstart_steps=3, mesh="dp2")
    step_of_reading = getattr(hf, reader)
    one, _ = start(job)

    def fails(*args, **keywords):
        if torch.distributed.get_rank() == 1:
            raise OSError(116, "Stale file handle")
        return step_of_reading(*args, **keywords)

    monkeypatch.setattr(hf, reader, fails)
    again, show = start(job)
    assert not taken(show) and "Stale file handle" in show.notes[0]
    assert gap(again, one) == 0
    monkeypatch.undo()


def test_runs_that_heal_one_cache_at_once_do_not_hurt_each_other(cache, monkeypatch):
    """Another run heals the cache before this one looks whether to replace it, or while it does."""
    job = small_job(warmstart_steps=3)
    one, _ = start(job)
    (stored,) = cache.iterdir()
    save, rename = hf.save, os.rename

    def heal():
        if not (stored / "config.json").exists():
            shutil.rmtree(stored, ignore_errors=True)
            save(stored, job.model, one, job.tokenizer)
            (stored / warmstart.DIGEST).write_text(warmstart._digest(stored))

    def heal_after(act, *args):
        act(*args)
        heal()

    def heal_first(act, *args):
        heal()
        act(*args)

    for module, name, act, when in (
        (hf, "save", save, heal_after), (os, "rename", rename, heal_first), (os, "rename", rename, heal_after),
    ):  # fmt: skip
        (stored / "config.json").unlink()
        with monkeypatch.context() as patch:
            patch.setattr(module, name, functools.partial(when, act))
            again, show = start(job)
        assert gap(again, one) == 0 and not any("could not be cached" in note for note in show.notes)
        assert list(cache.iterdir()) == [stored]
        assert taken(start(job)[1])


def test_a_cache_that_cannot_be_written_is_said_and_the_run_goes_on(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    weights, show = start(small_job(warmstart_steps=2))
    assert any("could not be cached" in note for note in show.notes)
    assert all(torch.isfinite(x).all() for x in trees.leaves(weights))


def test_without_a_home_directory_the_cache_is_among_the_temporary_folders(tmp_path, monkeypatch):
    """As in a container whose user has no entry in /etc/passwd."""

    def nobody(_):
        raise KeyError("uid not found")

    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    start(small_job(warmstart_steps=2))
    folder = tmp_path / f"funrl-cache-{os.getuid()}"
    (stored,) = (folder / "warmstart").iterdir()
    assert stored.is_dir() and folder.stat().st_mode & 0o777 == 0o700
    assert taken(start(small_job(warmstart_steps=2))[1])
    folder.chmod(0o777)  # anybody may have put something there
    _, show = start(small_job(warmstart_steps=2))
    assert not taken(show)
    assert f"the warm start is not cached: {folder} is not this user's own; XDG_CACHE_HOME may name" in show.notes[0]


def test_drafts_that_nobody_finishes_are_removed(cache):
    for age, name in ((0, "tmpnew"), (10**6, "tmpold")):
        (cache / name / "made").mkdir(parents=True)
        os.utime(cache / name, (time.time() - age,) * 2)
    start(small_job(warmstart_steps=2))
    assert (cache / "tmpnew").exists() and not (cache / "tmpold").exists()


def test_no_steps_leave_the_weights_of_the_seed(cache):
    a, b, c = (start(small_job(seed=seed))[0] for seed in (0, 0, 1))
    assert gap(a, b) == 0 and gap(a, c) > 0.01
    assert not cache.exists()


@pytest.mark.gloo
@pytest.mark.parametrize("mesh", ["dp1", "dp2,tp2"])
def test_weights_from_a_directory(mesh, tmp_path):
    job = small_job(mesh=mesh)
    one, _ = start(small_job(seed=5))
    hf.save(tmp_path / "model", job.model, one, job.tokenizer)
    job = dataclasses.replace(job, settings=with_flags(job.settings, model=str(tmp_path / "model")))
    loaded, _ = start(job)
    assert all(torch.equal(a, b) for a, b in zip(trees.leaves(loaded), trees.leaves(one), strict=True))


def test_weights_that_are_read_as_something_else_are_said(tmp_path):
    job, file = small_job(), tmp_path / "model" / "model.safetensors"
    hf.save(tmp_path / "model", job.model, start(job)[0], job.tokenizer)
    tensors, name = load_file(file), "model.layers.0.mlp.up_proj.weight"
    tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.tensor(0.5)}
    save_file(tensors, file)
    raw = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "fp8"}}))
    loaded, show = start(dataclasses.replace(job, settings=with_flags(job.settings, model=str(tmp_path / "model"))))
    assert [note.startswith("the files have weights in FP8") for note in show.notes] == [True]
    assert torch.equal(loaded["layers"][0]["mlp"]["up"], tensors[name].double() / 2)


def test_bfloat16_keeps_float32_weights():
    job = small_job(dtype="bfloat16", warmstart_steps=2)
    run, state = begin(job, single())
    for role in state.roles.values():
        assert {x.dtype for x in trees.leaves(role.params)} == {torch.float32}
    assert dict(run.parts.generator.engine.held_weights())["norm"].dtype == torch.bfloat16
