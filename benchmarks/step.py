"""CPU-seconds and wall time of one training step by phase: PPO, GRPO, and TRL's GRPO where trl is installed.

    OMP_NUM_THREADS=1 python benchmarks/step.py [--turns=7] [--kl_coef=0.04] [--token_budget=1536]

All start from the same random model and the same prompts, sample with the same settings, and take one optimizer step on
each batch in float32. They take turns in one process, so what else the machine does falls on all of them; medians are
shown, and the ratio of each turn's seconds. TRL runs with its defaults but for what would make it do other work:
no bfloat16 and no gradient checkpointing. Where the KL coefficient is 0, as is TRL's default, GRPO keeps no reference.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from absl import app, flags
from instruction_set import limit_instructions

from funrl import trees
from funrl.algos import grpo, ppo
from funrl.algos.core import Algorithm
from funrl.data.tokenizer import character_tokenizer
from funrl.mesh.mesh import single
from funrl.models import decoder_model
from funrl.models.decoder.config import decoder_config
from funrl.models.huggingface import directories as hf
from funrl.trainer import phases, startup
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.settings.settings import Settings, settings_of
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.sync import sync

LAYERS = flags.DEFINE_integer("layers", 4, "layers")
EMBED = flags.DEFINE_integer("embed", 256, "model width; heads have 64")
VOCAB = flags.DEFINE_integer("vocab", 2048, "vocabulary")
PROMPTS = flags.DEFINE_integer("prompts", 8, "prompts a step")
SAMPLES = flags.DEFINE_integer("samples", 8, "completions of each prompt")
PROMPT = flags.DEFINE_integer("prompt_tokens", 32, "tokens of each prompt")
NEW = flags.DEFINE_integer("new_tokens", 64, "tokens of each completion")
KL = flags.DEFINE_float("kl_coef", 0.0, "of both GRPOs; above 0 they keep a reference")
TOKEN_BUDGET = flags.DEFINE_integer("token_budget", Settings().updates.token_budget, "tokens in one pass of funrl")
PPO = flags.DEFINE_bool("ppo", True, "measure PPO too")
TURNS = flags.DEFINE_integer("turns", 7, "timed turns of each, after one that is not timed")
THREADS = flags.DEFINE_integer("threads", 1, "CPU threads")

INSTALL = "trl is not installed here, so there is nothing to compare with: pip install trl datasets accelerate"
REWARD = "def reward(prompt, completion, **fields):\n    return sum(map(ord, completion)) % 97 / 97\n"
PHASES = (
    "generate",
    "reward",
    "score_policy",
    "score_reference",
    "score_critic",
    "advantage",
    "update_critic",
    "update_policy",
    "reshard",
)
LR = 1e-5

Seconds = tuple[float, float]  # CPU, wall
Times = dict[str, Seconds]  # by phase, and "total"


def now() -> Seconds:
    return time.process_time(), time.perf_counter()


def since(start: Seconds) -> Seconds:
    cpu, wall = now()
    return cpu - start[0], wall - start[1]


class BothClock(Clock):
    """A `Clock` that counts CPU-seconds too."""

    def __init__(self) -> None:
        super().__init__()
        self.times: Times = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = now()
        yield
        before, more = self.times.get(name, (0.0, 0.0)), since(start)
        self.times[name] = (before[0] + more[0], before[1] + more[1])

    def move(self, seconds: float, name: str, to: str) -> None:
        """Count seconds of one phase as another's; here they are rewards, which this process computes itself."""
        for phase, some in ((name, -seconds), (to, seconds)):
            cpu, wall = self.times.get(phase, (0.0, 0.0))
            self.times[phase] = (cpu + some, wall + some)


class Silent:
    """Shows nothing."""

    def samples(self, *what: object) -> None: ...

    def note(self, text: str) -> None: ...

    def checkpoint_folder(self) -> None: ...


class Files(NamedTuple):
    """Inputs of a run, from disk."""

    model: Path
    prompts: Path
    reward: Path


def make_files(folder: Path) -> Files:
    """A random model with a tokenizer of one token a character, random prompts and a reward."""
    files = Files(folder / "model", folder / "prompts.jsonl", folder / "reward.py")
    heads = max(1, EMBED.value // 64)
    config = decoder_config(
        vocab=VOCAB.value,
        embed=EMBED.value,
        layers=LAYERS.value,
        heads=heads,
        kv_heads=max(1, heads // 2),
        head=64,
        mlp=4 * EMBED.value,
        bos=1,
        eos=(1,),
        pad=0,
    )
    alphabet = "".join(chr(0x4E00 + i) for i in range(VOCAB.value - 2))
    model = decoder_model(config)
    hf.save(files.model, model, model.init(torch.Generator().manual_seed(0)), character_tokenizer(alphabet))
    draw = random.Random(0)
    lines = [json.dumps({"prompt": "".join(draw.choices(alphabet, k=PROMPT.value))}) for _ in range(40 * PROMPTS.value)]
    files.prompts.write_text("\n".join(lines) + "\n")
    files.reward.write_text(REWARD)
    return files


def funrl_step(files: Files, compose: Callable[[], Algorithm]) -> Callable[[], Times]:
    """A function that takes one step of funrl and says how long each phase took."""
    settings = settings_of(
        device="cpu",
        compile="off",
        model=str(files.model),
        prompts=str(files.prompts),
        reward=f"{files.reward}:reward",
        batch_prompts=PROMPTS.value,
        samples_per_prompt=SAMPLES.value,
        max_new_tokens=NEW.value,
        minibatches=1,
        token_budget=TOKEN_BUDGET.value,
        lr=LR,
    )
    job, mesh = prepare(settings, compose), single()
    clock = BothClock()
    run, state = startup.begin_run(job, mesh, Silent(), clock=clock)
    state = sync(run.parts, state)._replace(step=1)

    def step() -> Times:
        nonlocal state
        start = now()
        rows, state, _ = phases.draw_batch(run, state)
        rows, state, _ = phases.score_batch(run, state, rows)
        state, _ = phases.learn_batch(run, state, rows)
        state = sync(run.parts, state, clock)
        assert rows.batch.tokens.shape == (PROMPTS.value * SAMPLES.value, PROMPT.value + NEW.value)
        times, clock.times = clock.times, {}
        return times | {"total": since(start)}

    return step


def with_trl(files: Files, folder: Path, after_step: Callable[[Times], None]) -> None:
    """Train with TRL's GRPO for all turns; `after_step` runs between two steps, outside of what is timed."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    space: dict = {}
    exec(REWARD, space)
    args = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
        max_completion_length=NEW.value,
        per_device_train_batch_size=PROMPTS.value * SAMPLES.value,
        num_generations=SAMPLES.value,
        max_steps=TURNS.value + 1,
        learning_rate=LR,
        lr_scheduler_type="constant",
        beta=KL.value,
        loss_type="grpo",
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(files.model, dtype=torch.float32),
        reward_funcs=lambda prompts, completions, **_: [space["reward"]("", c) for c in completions],
        args=args,
        train_dataset=Dataset.from_list([json.loads(line) for line in files.prompts.read_text().splitlines()]),
        processing_class=AutoTokenizer.from_pretrained(files.model),
    )
    times: Times = {}
    mark = {"step": now(), "update": now()}
    generate, make_batch = trainer._generate, trainer._generate_and_score_completions

    @functools.wraps(generate)
    def timed_generate(*args, **kwargs):
        start = now()
        out = generate(*args, **kwargs)
        times["generate"] = since(start)
        return out

    @functools.wraps(make_batch)
    def timed_batch(*args, **kwargs):
        out = make_batch(*args, **kwargs)
        mark["update"] = now()
        return out

    class Marks(TrainerCallback):
        def on_train_begin(self, *_, **__):
            mark["step"] = now()

        def on_optimizer_step(self, *_, **__):
            times["update_policy"] = since(mark["update"])

        def on_step_end(self, *_, **__):
            after_step(times | {"total": since(mark["step"])})
            mark["step"] = now()

    trainer._generate, trainer._generate_and_score_completions = timed_generate, timed_batch
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Marks())
    trainer.train()


def main(argv: list[str]) -> None:
    del argv
    limit_instructions()
    torch.set_num_threads(THREADS.value)
    algorithms = {"PPO": ppo} if PPO.value else {}
    algorithms |= {"GRPO": functools.partial(grpo, kl_coef=KL.value)}
    turns: dict[str, list[Times]] = {name: [] for name in algorithms}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = make_files(folder)
        steps = {name: funrl_step(files, compose) for name, compose in algorithms.items()}

        def ours() -> None:
            for key, step in steps.items():
                turns[key].append(step())

        def after_trl(times: Times) -> None:
            turns.setdefault("TRL GRPO", []).append(times)
            ours()

        if importlib.util.find_spec("trl") is None:
            print(INSTALL)
            for _ in range(TURNS.value + 1):
                ours()
        else:
            with_trl(files, folder, after_trl)
        count = trees.count(hf.check_directory(files.model).shapes)
    rows = f"{PROMPTS.value} prompts x {SAMPLES.value} samples of {PROMPT.value} + {NEW.value} tokens"
    print(f"{count / 1e6:.1f}M parameters, {rows}, {THREADS.value} threads, float32, KL coefficient {KL.value} in GRPO")
    report({key: steps_[1:] for key, steps_ in turns.items()})


def report(turns: dict[str, list[Times]]) -> None:
    """Print medians of the seconds of each phase, and ratios of the turns."""

    def median(key: str, phase: str) -> str:
        pairs = [times[phase] for times in turns[key] if phase in times]
        return (
            f"{statistics.median(c for c, _ in pairs):8.2f}{statistics.median(w for _, w in pairs):8.2f}"
            if pairs
            else 16 * " "
        )

    print(f"{'seconds: CPU, wall':<20}" + "".join(f"{key:>16}" for key in turns))
    for phase in (*PHASES, "total"):
        print(f"{phase:<20}" + "".join(median(key, phase) for key in turns))
    for key in [k for k in ("GRPO", "PPO") if "TRL GRPO" in turns and k in turns]:
        for i, kind in enumerate(("CPU", "wall")):
            ratios = [t["total"][i] / o["total"][i] for t, o in zip(turns["TRL GRPO"], turns[key], strict=True)]
            low, mid, high = min(ratios), statistics.median(ratios), max(ratios)
            print(f"TRL GRPO / {key}, {kind} seconds: {mid:.2f} ({low:.2f} .. {high:.2f})")


if __name__ == "__main__":
    app.run(main)
