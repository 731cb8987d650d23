"""The model that a run on the embedded task begins with: `funrl sft` makes it, and it is cached."""

import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest
import torch
from child_processes import children
from compiled_kernels_cache import share_kernels
from safetensors.torch import load_file

from funrl.algos import recipe
from funrl.api import warm_start
from funrl.api.warm_start import sft_flags, warm_started
from funrl.models import decoder_model, with_fields
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.weight_files import WHOLE
from funrl.tasks import arithmetic
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import settings_of


def job_of(steps=2, **settings):
    return prepare(settings_of(warmstart_steps=steps, device="cpu", **settings), recipe("grpo"))


def default_job():
    """The job of `funrl grpo` without flags, on the CPU."""
    return prepare(settings_of(device="cpu"), recipe("grpo"))


def weights_of(job):
    """Weights that a job begins with, after its warm start."""
    with warm_started(job) as started:
        return dict(hf.load(started.start)[1]["layers"][0]["mlp"]), Path(started.start)


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache without models for a test."""
    share_kernels(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "funrl" / "warmstart"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A cache with one model, which tests copy."""
    folder = tmp_path_factory.mktemp("cache")
    share_kernels(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        weights, path = weights_of(job_of())
    return folder, weights, path.name


@pytest.fixture
def stored(made, tmp_path, monkeypatch):
    """The cached model in a cache for a test."""
    folder, _, name = made
    shutil.copytree(folder, tmp_path / "copy")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "copy"))
    return tmp_path / "copy" / "funrl" / "warmstart" / name


def test_a_second_run_takes_it_from_the_cache(made, stored, capsys):
    weights, path = weights_of(job_of(lr=0.5, max_new_tokens=5, batch_prompts=6))
    assert path == stored and same(weights, made[1])
    assert "warm start: 2 steps of funrl sft, taken from the cache" in capsys.readouterr().err


@pytest.mark.slow
def test_it_is_what_the_printed_command_makes(made, cache, tmp_path, capsys, monkeypatch):
    """Typed by hand, on the same files, the command gives the same weights to the bit."""
    kept = tmp_path / "kept"
    remove = shutil.rmtree

    def keep(path, **keywords):
        shutil.copytree(path, kept, dirs_exist_ok=True)
        remove(path, **keywords)

    monkeypatch.setattr(warm_start.shutil, "rmtree", keep)
    weights, _ = weights_of(job_of())
    assert same(weights, made[1]), "made twice, it is the same"
    (line,) = (
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("warm start: python -m funrl.experiments.sft")
    )
    assert "--model=initial" in line and "--steps=2 " in line and "--batch_prompts=256" in line
    records = [json.loads(line) for line in (kept / "demonstrations.jsonl").read_text().splitlines()]
    pairs = [(record["prompt"], record["completion"]) for record in records]
    assert pairs == arithmetic.demonstrations(0, 2 * 256)
    config = json.loads((kept / "run" / "config.json").read_text())["flags"]
    assert {name: config[name] for name in sft_flags(job_of())} == sft_flags(job_of()) | {"save_every": "0"}


def test_that_of_the_defaults_is_part_of_the_package(cache, capsys):
    _, path = weights_of(default_job())
    assert path.parent == warm_start.SHIPPED and not cache.exists()
    assert "warm start: 500 steps of funrl sft, part of the package" in capsys.readouterr().err
    assert [path.name] == [folder.name for folder in warm_start.SHIPPED.iterdir()]


@pytest.mark.slow
def test_that_of_the_package_is_what_a_training_makes(cache, monkeypatch):
    """To the bit where vectors are as wide as those of the processor that made it, which had AVX-512."""
    shipped = load_file(warm_start.SHIPPED / warm_start._key(default_job()) / WHOLE)
    monkeypatch.setattr(warm_start, "SHIPPED", cache)  # which has none
    _, path = weights_of(default_job())
    trained = load_file(path / WHOLE)
    assert shipped.keys() == trained.keys()
    exact = torch.backends.cpu.get_cpu_capability() == "AVX512"
    for name, weights in shipped.items():
        torch.testing.assert_close(trained[name], weights, rtol=0, atol=0.0 if exact else 1e-5)


@pytest.mark.slow
def test_the_cache_is_of_one_model_seed_length_and_dtype():
    jobs = [job_of(), job_of(seed=1), job_of(steps=3), job_of(dtype="float64"), job_of(task="arithmetic_moe")]
    assert len({warm_start._key(job) for job in jobs}) == len(jobs)
    assert len({warm_start._key(job) for job in (job_of(), job_of(lr=0.5), job_of(steps=2, max_new_tokens=5))}) == 1


@pytest.mark.slow
def test_the_model_of_experts_and_float64(cache):
    with warm_started(job_of(task="arithmetic_moe", dtype="float64")) as started:
        model, weights = hf.load(started.start, torch.float64)
    assert model.abilities.routers is not None
    assert not torch.equal(weights["embed"], weights["embed"].float().double()), "it is kept in float64"


def flipped(file):
    """One bit, in the middle of the weights."""
    data = file.read_bytes()
    middle = len(data) * 3 // 4
    file.write_bytes(data[:middle] + bytes([data[middle] ^ 16]) + data[middle + 1 :])


def another_model(folder):
    model = decoder_model(with_fields(job_of().model.config, vocab=24))
    hf.save(folder, model, model.init(torch.Generator().manual_seed(0)))
    (folder / warm_start.DIGEST).write_text(warm_start._digest(folder))


DAMAGES = {
    "a bit flipped": lambda folder: flipped(folder / WHOLE),
    "no checksum": lambda folder: (folder / warm_start.DIGEST).unlink(),
    "weights empty": lambda folder: (folder / WHOLE).write_bytes(b""),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "another model": another_model,
    "a file in its place": lambda folder: (shutil.rmtree(folder), folder.write_text("")),
    "a link to nothing in its place": lambda folder: (shutil.rmtree(folder), folder.symlink_to("nowhere")),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_cache_is_said_and_made_again(damage, made, stored, capsys, monkeypatch):
    folder, weights, name = made
    whole = folder / "funrl" / "warmstart" / name
    monkeypatch.setattr(warm_start, "_make", lambda draft, job: shutil.copytree(whole, draft / "run" / "model"))
    damage(stored)
    again, path = weights_of(job_of())
    assert path == stored and same(again, weights)
    text = capsys.readouterr().err
    assert f"the cached warm start in {stored} is damaged (" in text and "it is made again" in text
    assert not list(stored.parent.glob("draft-*"))


def _start(folder, results):
    os.environ["XDG_CACHE_HOME"] = folder
    with warm_started(job_of()) as started:
        results.put(started.start)


@pytest.mark.slow
def test_processes_that_want_the_same_one_wait_for_each_other(cache, tmp_path):
    """One makes it, and the other takes it."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_start, args=(str(tmp_path), results)) for _ in range(2)]
    for process in processes:
        process.start()
    starts = {results.get(timeout=120) for _ in processes}
    for process in processes:
        process.join(30)
    assert len(starts) == 1 and len([path for path in cache.iterdir() if path.is_dir()]) == 1


def test_a_cache_that_cannot_be_written_is_said_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    weights, path = weights_of(job_of(steps=1))
    assert "the warm start is not cached: " in capsys.readouterr().err
    assert all(torch.isfinite(x).all() for x in weights.values())
    assert not path.exists(), "the temporary one is removed"


def test_a_command_that_fails_is_an_error_with_its_last_lines(cache, monkeypatch):
    monkeypatch.setattr(warm_start, "sft_flags", lambda job: {"batch_prompts": 256, "lr": -1.0})
    with pytest.raises(SettingsError, match=r"the warm start failed: .*--lr=-1"):
        weights_of(job_of())
    assert not list(cache.glob("draft-*"))


@pytest.mark.slow
def test_an_interrupt_ends_the_command(cache, monkeypatch):
    pids = []

    def interrupted(text):
        pids.extend(children())
        if "loss" in text:
            raise KeyboardInterrupt

    monkeypatch.setattr(warm_start, "_print", interrupted)
    with pytest.raises(KeyboardInterrupt):
        weights_of(job_of(steps=8))
    assert pids and not children() & set(pids) and not list(cache.glob("draft-*"))


def test_without_a_warm_start_a_job_stays_as_it_is(cache):
    job = job_of(steps=0)
    with warm_started(job) as started:
        assert started is job and started.start is None
    assert not cache.exists()


def test_it_needs_no_variables_of_a_launcher(cache, monkeypatch):
    job = job_of(steps=1)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "nowhere"}.items():
        monkeypatch.setenv(name, value)
    with warm_started(job) as started:
        assert Path(started.start).is_dir()


def test_only_the_first_rank_of_a_launcher_makes_it(cache, monkeypatch):
    job = job_of()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with warm_started(job) as started:
        assert started.start is None
    assert not cache.exists()
