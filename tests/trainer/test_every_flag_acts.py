"""Every flag, in every kind of run: another number, another file, another amount of work, a line, or a refusal.

How a flag is changed follows from its type and bounds, or is in `EXAMPLES`; what it should change is in `EFFECTS`.
"""

import collections
import contextlib
import functools
import hashlib
import io
import json
import re
import shutil
from typing import Any, NamedTuple

import pytest
import torch
from free_ports import free_port
from test_flags_act import CHANGES, SHOWN, TESTED
from torch.utils._python_dispatch import TorchDispatchMode

from funrl import trees
from funrl.cli.run import main
from funrl.data.tokenizer import character_tokenizer
from funrl.models import decoder_model, with_fields, with_value_head
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.peft_files import write_peft
from funrl.models.lora import trained_part, with_lora
from funrl.models.model import Lora
from funrl.tasks import arithmetic
from funrl.trainer.settings.settings import settings_flags

CHARACTERS = "0123456789+=\n abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:;!?'\"()[]{}/-_*#"
PROMPTS = [f"{a}+{b}=" for a in range(3, 10) for b in range(11, 16)]
REWARD = """
def reward(prompt, completion, **fields):
    return sum(map(completion.count, "12345abcde")) / 4 - 0.25 * completion.count("+")

def other(prompt, completion, **fields):
    return float(len(completion))

def weigh(prompts, step, metrics):
    return [float(place % 2) for place in range(len(prompts))]
"""
COMMON = {
    "device": "cpu",
    "batch_prompts": 2,
    "steps": 2,
    "save_every": 0,
    "dtype": "float64",
    "compile": "off",
    "eval_prompts": 2,
    "lr": 0.05,
    "eval_every": 1,
}
OF_PROMPTS = {"steps": 1, "reward_workers": 0, "samples_per_prompt": 3, "max_new_tokens": 5, "minibatches": 2}
EFFECTS = {  # what flags change besides "numbers", which are metrics, completions and weights
    # files that a run writes
    "files": "save_dtype run_dir save_every keep_checkpoints save_rollouts keep_rollouts profile report_to",
    # what is printed
    "output": (
        "resume overwrite window clock dry_run prompt_tokens text_tokens assume_pictures assume_turns "
        "assume_turn_tokens assume_tool_seconds tool_trace lengths json hardware metrics_port"
    ),
    # time or memory, but no result
    "work": (
        "remat offload kv_cache_gb decode_rows speculate state_snapshot_tokens verify_sync probe_sync_every "
        "token_budget score_token_budget"
    ),
    # the devices and processes that compute
    "ranks": (
        "reward_workers env_workers max_waiting mesh generate_mesh place device sequence_parallel "
        "split_residual fsdp fsdp_axes fsdp_models engine_url queue profile_ranks"
    ),
    # what happens on a failure or at a limit
    "event": (
        "long_prompts max_prompt_tokens max_text_tokens on_reward_error reward_timeout episode_turns "
        "episode_tokens env_timeout episode_retries tool_parser tool_tokens history env_check timeout "
        "heartbeat stalled_after engine_timeout on_gap foreign_rows numerics max_refills empty_filter max_skipped "
        "follow"  # after more steps than one
    ),
}
EXAMPLES = {  # values with an effect, of flags whose type and bounds give none
    "backend": "xla",
    "difficulty": "0.1,0.9",
    "prompt_template": "1{prompt}",
    "system_prompt": "3",
    "template_arguments": "enable_thinking:false",
    "step_separator": "+",
    "reward_weights": "2",
    "judge_pattern": "(\\d)",
    "env_args": "turns:1",
    "agents": "policy:policy,other:frozen",
    "save_every": "1",
    "lengths": "mean:4,max:8",
    "place": "generate:1",
    "fsdp_models": "policy",
    "engine_url": "http://localhost:1",
    "freeze": "embed",
    "follow": "reference:1",
    "teacher_context": "sibling",
    "lora_targets": "q_proj",
    "profile": "1:1",
    "profile_ranks": "all",
    "mesh": "dp1,tp1",
    "generate_mesh": "tp2",
    "fields": "prompt:question",
    "metrics_port": str(free_port(20200, 20300)),
}  # one rank is one rank by any name
TIMES = re.compile(r"time_s/|perf/|memory/")

ENDS = (  # what a run says that cannot go on with other samples or scores
    "--max_refills",
    "rescale the reward function",
)


class Kind(NamedTuple):
    """A kind of run: the program, flags, and the data that it is given."""

    program: str
    flags: dict[str, Any]
    data: str = "prompts"


KINDS = {  # GRPO and PRIME read what PPO and DAPO read, KTO what DPO reads
    "critic, reference": Kind("ppo", {}),
    "filter, adapters, scorer": Kind("dapo", {"max_refills": 2, "lora_rank": 2, "reward_model": "scorer"}),
    "teacher": Kind("distillation", {"teacher": "other", "kind": "forward"}),
    "texts": Kind("sft", {}, "demonstrations"),
    "embedded task, experts": Kind("sft", {"task": "arithmetic_moe", "warmstart_steps": 0}, ""),
    "pairs": Kind("dpo", {}, "pairs"),
    "reward model": Kind("reward_model", {}, "pairs"),
}


class Outcome(NamedTuple):
    """Everything of a run that a flag may change; see `EFFECTS`."""

    status: int
    numbers: list[Any]
    files: list[str]
    text: str
    work: collections.Counter


class Counting(TorchDispatchMode):
    """Count the operations by name and shapes."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function, tuple(x.shape for x in args if isinstance(x, torch.Tensor))] += 1
        return function(*args, **kwargs or {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, data, a reward and everything else that a flag may name."""
    made = tmp_path_factory.mktemp("flags")
    tokenizer = character_tokenizer(CHARACTERS)
    sizes = {"vocab": len(CHARACTERS) + 2, "embed": 16, "layers": 1, "heads": 4, "kv_heads": 2, "head": 4, "mlp": 32}
    model = decoder_model(with_fields(arithmetic.model_config(), max_positions=128, **sizes))
    for seed, (name, item) in enumerate(
        {"model": model, "other": model, "scorer": with_value_head(model), "scorer2": with_value_head(model)}.items()
    ):
        weights = item.init(torch.Generator().manual_seed(seed))
        noise = torch.Generator().manual_seed(seed)
        for x in trees.leaves(weights):  # so that some tokens are far more probable, and scores are not all 0
            x += 0.3 * torch.randn(x.shape, generator=noise) if x.ndim > 1 else 0
        hf.save(made / name, item, weights, tokenizer)
    adapted = with_lora(model, Lora(2, 4.0, ("q",)))
    own = trees.map(lambda x: torch.full(x.shape, 0.2), trained_part(adapted, adapted.shapes))
    write_peft(made / "adapter", adapted, dict(trees.named(own)), made / "model")
    records = {
        "prompts": [{"prompt": p, "answer": "1"} for p in PROMPTS],
        "demonstrations": [{"prompt": p, "completion": "123"} for p in PROMPTS],
        "pairs": [{"prompt": p, "chosen": "123", "rejected": "45"} for p in PROMPTS],
    }
    for name, lines in records.items():
        for prefix in ("", "1"):
            changed = [line | {"prompt": prefix + line["prompt"], "question": line["prompt"] + "0"} for line in lines]
            (made / f"{name}{prefix}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
    (made / "r.py").write_text(REWARD)
    (made / "chat.jinja").write_text("{% for message in messages %}:{{ message['content'] }}{% endfor %}")
    (made / "judge.txt").write_text("{{completion}}=")
    (made / "tools.json").write_text('[{"type": "function"}]')
    (made / "waits.jsonl").write_text('{"waits": [2]}\n')
    return made


def base_flags(kind, folder):
    """The flags of the run that every flag changes."""
    flags = COMMON | ({} if kind.data == "" else {"model": folder / "model"}) | {"run_dir": folder / "run"}
    if kind.data == "prompts":
        flags |= {"prompts": folder / "prompts.jsonl", "reward": f"{folder}/r.py:reward"}
    elif kind.data:
        flags |= {"data": folder / f"{kind.data}.jsonl"}
    flags |= OF_PROMPTS if kind.data == "prompts" else {}
    return flags | {
        name: folder / x if name in ("reward_model", "teacher", "reward") else x for name, x in kind.flags.items()
    }


def named_files(kind, folder):
    """Values of the flags that name files, which a declaration cannot know."""
    data = kind.data or "prompts"
    return {
        "model": "other",
        "teacher": "scorer2",
        "reward_model": "scorer2",
        "process_reward_model": "scorer",
        "judge": "other",
        "prompts": "prompts1.jsonl",
        "data": f"{data}1.jsonl",
        "eval_data": f"{data}1.jsonl",
        "reward": "r.py:other",
        "curriculum": "r.py:weigh",
        "env": "r.py:weigh",
        "few_shot": "demonstrations1.jsonl:1",
        "chat_template": "chat.jinja",
        "tools": "tools.json",
        "tool_trace": "waits.jsonl",
        "judge_template": "judge.txt",
        "run_dir": "elsewhere",
        "adapter": "adapter",
    }


def other_values(flag, base, kind, folder):
    """Texts of values to change a flag to: by its declaration, and by the value that it has."""
    files, now = named_files(kind, folder), base.get(flag.name, flag.default)
    if flag.name in files:
        return [f"{folder}/{files[flag.name]}"]
    if flag.name in EXAMPLES:
        return [EXAMPLES[flag.name]]
    if flag.type is bool:
        return [str(not now).lower()]
    choices = [re.split(", ?", match[2]) for b in flag.bounds if (match := re.match("(one|some) of ([^;]*)", b.text))]
    if choices:
        return [choice for choice in choices[0] if choice != now]
    assert flag.type is not str, f"--{flag.name} needs a value in EXAMPLES, or a file"
    start = 0 if now is None else now
    numbers = (
        (1, 0, 2, start + 1, 2 * start + 1) if flag.type is int else (0.5, 0.97, start + 0.1, start / 2, 1e6, 1e-6)
    )
    return [str(x) for x in dict.fromkeys(numbers) if x != now and not flag.problem(x)]


def outcome(program, flags, folder, counting=False):
    """Run a command line in this process."""
    for name in ("run", "elsewhere"):
        shutil.rmtree(folder / name, ignore_errors=True)
    shown, mode = io.StringIO(), Counting()
    argv = [program, *(f"--{name}={value}" for name, value in flags.items())]
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown), mode if counting else shown_only():
        status = main(program, argv)
    written = [path for name in ("run", "elsewhere") for path in sorted((folder / name).rglob("*")) if path.is_file()]
    names = sorted({re.sub(r"tfevents.*|/d/.*", "", str(path.relative_to(folder))) for path in written})
    return Outcome(status, [x for path in written for x in numbers_in(path)], names, shown.getvalue(), mode.counts)


def work_after_itself(program, flags, folder):
    """The work of a run after an equal one: caches of the process may spare a run what the one before it did."""
    outcome(program, flags, folder)
    return outcome(program, flags, folder, counting=True).work


def shown_only():
    return contextlib.nullcontext()


def numbers_in(path):
    """The numbers and texts of a file of a run, without times and memory."""
    if path.name == "metrics.jsonl":
        lines = map(json.loads, path.read_text().splitlines())
        return [str({name: x for name, x in line.items() if not TIMES.search(name)}) for line in lines]
    if path.name in ("samples.jsonl", "eval_samples.jsonl"):
        return [path.read_text()]
    return [hashlib.sha256(path.read_bytes()).hexdigest()] if path.name == "model.safetensors" else []


def effect_of(flag):
    """What a flag should change: one of `EFFECTS`, or "numbers"."""
    return next((effect for effect, names in EFFECTS.items() if flag.name in names.split()), "numbers")


def what_it_does(flag, base, changed):
    """What a change of a flag did, as `effect_of` without "work", or "line", "refused" or "failed"; "" for nothing."""
    lines = [line for line in changed.text.splitlines() if f"--{flag.name}" in line]
    if changed.status == 2:
        return "refused" if lines else f"refused without its name: {changed.text.strip()[-300:]}"
    if changed.status and any(item in changed.text for item in ENDS):
        return "line"
    if changed.status:
        return f"failed: {changed.text.strip()[-300:]}"
    if any(line not in base.text for line in lines):
        return "line"
    if changed.numbers != base.numbers and effect_of(flag) != "output":
        return "numbers"
    if changed.files != base.files:
        return "files"
    return "output" if effect_of(flag) == "output" and changed.text != base.text else ""


WHOLE = ("critic, reference", "texts")  # the others have the loop of one of these
FURTHER = [name for name in KINDS if name not in WHOLE]


def flags_of(name):
    """The flags that a kind of run tries: all; of kinds that differ in roles or data alone, by turns, and their own.

    What changes the weights or the output of a run that samples is left to tests/trainer/test_flags_act.py.
    """
    flags = list(settings_flags().values())
    if KINDS[name].data == "prompts":
        flags = [flag for flag in flags if flag.name not in {*CHANGES, *SHOWN}]
    if name in WHOLE:
        return flags
    own = {"empty_filter", "reward_model", "teacher", "teacher_top_k"}
    turn = FURTHER.index(name)
    return [flag for number, flag in enumerate(flags) if flag.name in own or number % len(FURTHER) == turn]


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_no_flag_is_taken_without_a_word(name, folder):
    kind = KINDS[name]
    flags = base_flags(kind, folder)
    base = outcome(kind.program, flags, folder)
    assert base.status == 0, base.text
    again = outcome(kind.program, flags, folder)
    assert (again.numbers, again.files) == (base.numbers, base.files), "the same run twice"
    work_of_base = functools.cache(lambda: work_after_itself(kind.program, flags, folder))
    silent = {}
    for flag in flags_of(name):
        if flag.name in ("compile", "dry_run"):
            continue  # they take seconds: test_flags_act.py names the test of one, and tests/cost has runs of the other
        if flag.name == "backend":
            continue  # JAX does not start in a process that forks: tests/trainer/test_lowered_runs.py
        if flag.name in ("speculate", "state_snapshot_tokens"):
            continue  # nothing repeats in texts this short, and no layer has states: see TESTED in test_flags_act.py
        if effect_of(flag) in ("ranks", "event") and flag.name in {*TESTED, *CHANGES}:
            continue  # this run has one rank, and no such event: the test that is named there has
        result = dict[str, str]()
        for text in other_values(flag, flags, kind, folder):
            other = flags | {flag.name: text}
            result[text] = what_it_does(flag, base, outcome(kind.program, other, folder))
            if effect_of(flag) == "work" and not result[text]:
                changed = outcome(kind.program, other, folder, counting=True).work
                result[text] = "work" if changed != work_of_base() else ""
            if result[text] in ("line", "refused", "numbers", *EFFECTS):
                break
        allowed = {"line", "refused", effect_of(flag)} | (
            {"files", "numbers"} if effect_of(flag) != "work" else {"numbers"}
        )
        if not allowed & set(result.values()):
            silent[flag.name] = result
    assert not silent, silent
