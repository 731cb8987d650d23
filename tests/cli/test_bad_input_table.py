"""Bad inputs, made by rule: each gives one clear line that names it, no traceback, before any work starts."""

import itertools
import json
import os
import re
import shutil
import struct
import sys

import forked_python
import pytest
import torch
from selection import quick

from funrl.cli.run import main
from funrl.flags.arguments import arguments_of, find_recipe
from funrl.models import decoder_model, with_fields
from funrl.models.huggingface import directories as hf
from funrl.tasks import arithmetic
from funrl.trainer.settings.settings import settings_flags
from funrl.trainer.storage.shard_server import record_digest

ODD = {bool: ("maybe", "2"), int: ("many", "1.5", "0x10", "nan"), float: ("fast", "nan", "inf", "-inf"), str: ()}


def outside(bound):
    """Texts of values that a bound's own text excludes."""
    if match := re.fullmatch(r"(at least|above|at most|below) (\S+)", bound.text):
        limit = 2**63 if match[2] == "2^63" else float(match[2])
        beyond = {"at least": limit - 1, "above": limit, "at most": limit + 1, "below": limit}[match[1]]
        return (str(int(beyond)) if beyond == int(beyond) else str(beyond),)
    if match := re.fullmatch(r"(one|some) of (\S.*)", bound.text):
        first = match[2].replace(" ", "").split(",")[0]
        return ("nonsense", first.upper() + "!", f"{first},nonsense", f"{first},{first}")
    if match := re.fullmatch(r"names such as (\w+).*", bound.text):  # any name: only a run knows which it has
        return ("-1x", f"{match[1]},{match[1]}")
    return ("nonsense", "-1x")


def bad_values(flag, tried):
    """Texts that a flag refuses; of those of its type only what no flag of like bounds has `tried`."""
    bounds = tuple(bound.text for bound in flag.bounds)
    texts = [*ODD[flag.type], *itertools.chain.from_iterable(map(outside, flag.bounds))]
    for text in dict.fromkeys(texts):
        key = flag.type, bounds, text
        if key not in tried and not (flag.type is str and not flag.bounds):
            yield text
        if text in ODD[flag.type]:
            tried.add(key)


def flag_cases():
    """(program, flags, the text that the error names)."""
    tried = set()
    for number, flag in enumerate(settings_flags().values()):
        program = "grpo" if "rl" in flag.kinds else "sft"
        for text in bad_values(flag, tried):
            yield program, [f"--{flag.name}={text}"], f"--{flag.name}={text}: "
        if number % 8 == 0:  # the same code refuses all of these
            yield program, [f"--{flag.name}q=1"], f"--{flag.name}q is not a flag"
        if len(flag.kinds) == 1 and number % 4 == 0:
            other, good = "sft" if program == "grpo" else "grpo", "" if flag.type is bool else f"={good_value(flag)}"
            yield other, [f"--{flag.name}{good}"], f"--{flag.name}"
    for recipe in ("grpo", "ppo", "dpo"):
        for flag in arguments_of(find_recipe(recipe), recipe).flags.values():
            if flag.name not in settings_flags():
                for text in bad_values(flag, tried):
                    yield recipe, [f"--{flag.name}={text}"], f"--{flag.name}={text}: "


def good_value(flag):
    values = ("1", "9", "0.5", "dp1", "optimizer", "x.jsonl", "x.py:f", "min", "hermes", "mean:4,max:8", "http://h:1")
    values += (__file__,)
    if flag.default is not None:
        return flag.default
    return next(text for text in values if not flag_problem(flag, text))


def flag_problem(flag, text):
    try:
        flag.parse(text)
    except ValueError as error:
        return str(error)
    return ""


VALUES = (None, True, 3, -1.5, [], {}, "", [1], {"a": 1})
FEW = (None, 3, [], {"a": 1})
GOOD_LINE = '{"prompt": "1+1="}'
LINES = [
    *(json.dumps(value) for value in VALUES),
    *(json.dumps({"prompt": value}) for value in VALUES),
    *(json.dumps({"prompt": [{"role": role, "content": "x"}]}) for role in FEW),
    *(json.dumps({"prompt": [{"role": "user", "content": content}]}) for content in FEW),
    *(json.dumps({"prompt": ["x", message]}) for message in FEW),
    *(GOOD_LINE[:cut] for cut in range(1, len(GOOD_LINE))),
    '{"prompt": "\\ud800"}',
    '{"prompt": "1", "answer": "\\udfff"}',
    "[" * 10**5,
    '{"prompt": ' + "[" * 10**5,
    '{"prompt": "1", "completion": "2"}',
    '{"prompt": "1" "answer": 2}',
    "\x00",
    "{'prompt': '1'}",
    "NaN",
    "1" * 5000,
]

CONFIG_VALUES = (None, "x", [], {"a": []}, -1, 0, 10**30, 1.5, True)
CONFIG_FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
TYPED_FIELDS = {
    "rms_norm_eps": ("x", None, [], 0, True),
    "rope_theta": ("x", None, {}, -1),
    "head_dim": ("x", 0, 10**30),
    "num_key_value_heads": ("x", [], 0),
    "eos_token_id": ("x", {}, [None]),
    "tie_word_embeddings": ("x", 3, []),
    "rope_scaling": ("x", [1], {"rope_type": 3}, {"rope_type": "linear", "factor": "x"}),
    "dtype": (3, "int8", []),
    "layer_types": ("x", 3, [1]),
    "architectures": ("x", 3),
    "model_type": (None, 3, [], "nonsense"),
}
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
TABLES = [
    *({"a": value} for value in VALUES),
    *({"a": {key: value for key, value in ENTRY.items() if key != missing}} for missing in ENTRY),
    *({"a": ENTRY | {"shape": value}} for value in (None, "x", [-1], [1.5], [2**70], [True])),
    *({"a": ENTRY | {"data_offsets": value}} for value in (None, "x", [8], [8, 0], [0, 2**70], [0, 4], [-8, 0])),
    {"a": ENTRY, "b": ENTRY},
]
INDEXES = [*VALUES, *({"weight_map": value} for value in VALUES if value != {"a": 1})]
INDEXES += [{"weight_map": {"x": value}} for value in (*VALUES, "../x", "/etc/passwd", "a\0b", "y" * 300, "gone")]

REWARDS = {
    "syntax": "def reward(:",
    "indent": "  x = 1\n y = 2",
    "import": "import no_such_module",
    "raises": "1 / 0",
    "leaves": "import sys\nsys.exit(0)",
    "empty": "",
    "value": "reward = 3",
    "none": "reward = None",
    "text": "reward = 'f'",
    "no_arguments": "def reward():\n    return 1",
    "one": "def reward(prompt):\n    return 1",
    "more": "def reward(prompt, completion, answer):\n    return 1",
    "named": "def reward(*, x):\n    return 1",
    "null": "\0",
    "other": "def rewrad(prompt, completion):\n    return 1",
    "deep": "(" * 500,
}


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A folder with a model, prompts and a reward, all good."""
    folder = tmp_path_factory.mktemp("own")
    model, tokenizer = decoder_model(arithmetic.model_config()), arithmetic.tokenizer()
    hf.save(folder / "model", model, model.init(torch.Generator().manual_seed(0)), tokenizer)
    wide = decoder_model(with_fields(arithmetic.model_config(), mlp=8))
    hf.save(folder / "wide", wide, wide.init(torch.Generator().manual_seed(0)), tokenizer)
    (folder / "p.jsonl").write_text(GOOD_LINE + "\n")
    (folder / "r.py").write_text("def reward(prompt, completion):\n    return 1")
    return folder


def refusal(program, flags, tmp_path, capsys):
    """The one line that a command is refused with, before any work."""
    capsys.readouterr()
    assert main(program, [program, "--device=cpu", f"--run_dir={tmp_path / 'run'}", *flags]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and "Traceback" not in err, err
    assert len(err.strip().splitlines()) == 1 and len(err) < 1500, err
    assert out == "" and not (tmp_path / "run").exists()
    return err


FLAG_CASES = list(flag_cases())


@pytest.mark.parametrize("case", FLAG_CASES, ids=lambda case: case[1][0][:60])
def test_flags(case, tmp_path, capsys):
    program, flags, names = case
    assert names in refusal(program, flags, tmp_path, capsys)


CUT = [n for n, line in enumerate(LINES) if GOOD_LINE.startswith(line)]  # lines that are cut off


@pytest.mark.parametrize("number", [n for n in range(len(LINES)) if n not in CUT[1:]])
def test_prompts(number, own, tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text(f"{GOOD_LINE}\n{LINES[number]}\n")
    flags = [f"--prompts={tmp_path}/bad.jsonl", f"--reward={own}/r.py:reward"]
    assert f"{tmp_path}/bad.jsonl, line 2" in refusal("grpo", flags, tmp_path, capsys)


def model_refusal(own, tmp_path, capsys, change):
    shutil.copytree(own / "model", tmp_path / "model")
    change(tmp_path / "model")
    flags = [f"--model={tmp_path}/model", f"--prompts={own}/p.jsonl", f"--reward={own}/r.py:reward"]
    return refusal("grpo", flags, tmp_path, capsys)


FIELDS = [(CONFIG_FIELDS[0], value) for value in CONFIG_VALUES]
FIELDS += [(field, value) for field in CONFIG_FIELDS[1:] for value in (None, "x", 0)]
FIELDS += [(field, value) for field, values in TYPED_FIELDS.items() for value in values]


@pytest.mark.parametrize(("field", "value"), FIELDS, ids=range(len(FIELDS)))
def test_configs(field, value, own, tmp_path, capsys):
    raw = json.loads((own / "model" / "config.json").read_text()) | {field: value}
    assert field in model_refusal(own, tmp_path, capsys, lambda to: (to / "config.json").write_text(json.dumps(raw)))


@pytest.mark.parametrize("number", range(len(TABLES)))
def test_tables(number, own, tmp_path, capsys):
    text = json.dumps(TABLES[number]).encode()
    table = struct.pack("<Q", len(text)) + text + bytes(8)
    change = lambda to: (to / "model.safetensors").write_bytes(table)  # noqa: E731
    assert "model.safetensors" in model_refusal(own, tmp_path, capsys, change)


@pytest.mark.parametrize("number", range(len(INDEXES)))
def test_indexes(number, own, tmp_path, capsys):
    def change(to):
        (to / "model.safetensors").unlink()
        (to / "model.safetensors.index.json").write_text(json.dumps(INDEXES[number]))

    assert "model.safetensors.index.json" in model_refusal(own, tmp_path, capsys, change)


BROKEN = {"": "is not JSON", "[]": "holds a list", "{": "is not JSON", "\x00": "is not JSON", "[" * 10**5: "too deeply"}


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_broken_files(file, text, own, tmp_path, capsys):
    says = f"{tmp_path}/model" if file == "tokenizer.json" else BROKEN[text]
    assert says in model_refusal(own, tmp_path, capsys, lambda to: (to / file).write_text(text))


@pytest.mark.parametrize("name", REWARDS)
def test_rewards(name, own, tmp_path, capsys):
    (tmp_path / f"{name}.py").write_text(REWARDS[name])
    flags = [f"--prompts={own}/p.jsonl", f"--reward={tmp_path}/{name}.py:reward"]
    assert f"--reward={tmp_path}/{name}.py:reward" in refusal("grpo", flags, tmp_path, capsys)
    assert not [module for module in sys.modules if module == name]


COMMANDS = [  # what one types, and the line that answers it; {own} is good, but for what this names
    ("grpp", "error: 'grpp' is not an experiment or a recipe; did you mean grpo? "),
    ("grpo --stpes=3", "error: --stpes is not a flag; did you mean --steps?"),
    ("ppo --lr=-1", "error: --lr=-1: it must be above 0"),
    ("grpo --mesh=dp0", "error: --mesh=dp0: "),
    ("grpo --prompts={own}/gone.jsonl --reward={own}/r.py:reward", "error: --prompts: {own}/gone.jsonl: no such file"),
    ("grpo --model={own}/gone --prompts={own}/p.jsonl", "error: --model: {own}/gone is not a directory"),
    ("sft --data={own}", "error: --data: {own}: "),
    ("export {own}", "error: {own} has no checkpoint; --save_every makes some"),
    ("grpo --run_dir={own}/model --device=cpu", "error: --run_dir={own}/model: holds a config.json that no run has"),
    ("grpo --resume --run_dir={run} {more} --optimizer=muon", "error: --resume: {run}/checkpoints/step-1 is of a run"),
]


@pytest.mark.slow
@pytest.mark.parametrize("typed", quick(COMMANDS, COMMANDS[:1]), ids=lambda pair: pair[0][:40])
def test_ten_through_the_command_itself(typed, own, trained, tmp_path, monkeypatch):
    if typed is COMMANDS[0]:  # in a new interpreter, the others in forks
        monkeypatch.setattr(forked_python, "can_fork", lambda: False)
    words, message = typed
    more = " ".join([*CHECKPOINT_FLAGS, f"--prompts={own}/p.jsonl", f"--reward={own}/r.py:reward", "--device=cpu"])
    places = {"own": own, "run": trained, "more": more}
    command = ["-m", "funrl.cli.main", *words.format(**places).split()]
    done = forked_python.run_python(command, tmp_path, os.environ)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(message.format(**places)), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and list(tmp_path.iterdir()) == []


def test_there_are_enough():
    files = len(LINES) + len(FIELDS) + len(TABLES) + len(INDEXES) + len(REWARDS)
    assert len(FLAG_CASES) >= 200 and files >= 150 and len(RECORDS) + len(FILES) * len(DAMAGES) >= 80


CHECKPOINT_FLAGS = (
    "--batch_prompts=4",
    "--eval_prompts=2",
    "--warmstart_steps=0",
    "--samples_per_prompt=2",
    "--max_new_tokens=4",
    "--reward_workers=0",
    "--save_every=1",
    "--steps=2",
    "--compile=off",
)


@pytest.fixture(scope="module")
def trained(own, tmp_path_factory):
    """The directory of a run with one checkpoint."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    flags = [
        *CHECKPOINT_FLAGS[:-2],
        "--compile=off",
        "--steps=1",
        f"--prompts={own}/p.jsonl",
        f"--reward={own}/r.py:reward",
    ]
    assert main("grpo", ["grpo", "--device=cpu", f"--run_dir={folder}", *flags]) == 0
    return folder


def checkpoint_refusal(own, trained, tmp_path, capsys, change, *more):
    """The one line that going on from a changed checkpoint is refused with; nothing in the directory has changed."""
    shutil.copytree(trained, tmp_path / "run")
    change(tmp_path / "run/checkpoints/step-1")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    flags = [*CHECKPOINT_FLAGS, f"--prompts={own}/p.jsonl", f"--reward={own}/r.py:reward", "--resume", *more]
    capsys.readouterr()
    assert main("grpo", ["grpo", "--device=cpu", f"--run_dir={tmp_path}/run", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and before == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    assert len(err.strip().splitlines()) == 1 and len(err) < 1500 and "Traceback" not in err
    assert err.startswith(f"error: --resume: {tmp_path}/run/checkpoints/step-1"), err
    return err


DAMAGES = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"x"),
}
FILES = ("_METADATA", "complete.json", "manifest.ocdbt", "d/*", "ocdbt.process_0/manifest.ocdbt", "ocdbt.process_0/d/*")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", DAMAGES)
def test_files_of_checkpoints(name, how, own, trained, tmp_path, capsys):
    if (name, how) == ("complete.json", "missing"):
        pytest.skip("without its record a checkpoint was never there")
    change = lambda step: DAMAGES[how](sorted(step.glob(name))[0])  # noqa: E731
    assert name.rstrip("*") in checkpoint_refusal(own, trained, tmp_path, capsys, change)


def rewritten(step, changes):
    """Change the record of a checkpoint, its checksum too."""
    record = json.loads((step / "complete.json").read_text())
    for keys, value in changes.items():
        place = record
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
    record.pop("digest")
    (step / "complete.json").write_text(json.dumps(record | {"digest": record_digest(record)}))


RECORDS = {
    **{f"{name} {value!r}": {(name,): value} for name in ("format", "step", "arrays", "files") for value in VALUES},
    **{f"{name} {value!r}": {(name,): value} for name in ("first", "run", "frozen") for value in VALUES if value != {}},
    **{f"array {value!r}": {("arrays", "step"): value} for value in (*VALUES, [[-1], "int64"], [[], "int65"], [[1]])},
    "a file elsewhere": {("files", "../x"): 3},
    "a file of another size": {("files", "manifest.ocdbt"): 10**30},
    "a later format": {("format",): 2},
    "another step": {("step",): 2},
    "another model": {("run", "embed"): 16},
    "another recipe": {("run", "learns"): ["critic", "policy"]},
    "another optimizer": {("run", "optimizer"): "muon"},
    "another vocabulary": {("run", "vocab"): 10**30},
}
del RECORDS["run {'a': 1}"], RECORDS["frozen {'a': 1}"], RECORDS["first {'a': 1}"]  # what another version may add


OF_OTHER_KINDS = [name for name in RECORDS if name.endswith(tuple(f" {x!r}" for x in VALUES[1:]))]  # beside None


@pytest.mark.parametrize("name", [name for name in RECORDS if name not in OF_OTHER_KINDS])
def test_records_of_checkpoints(name, own, trained, tmp_path, capsys):
    checkpoint_refusal(own, trained, tmp_path, capsys, lambda step: rewritten(step, RECORDS[name]))


@pytest.mark.parametrize("text", [*BROKEN, "null", "3", '{"digest": 3}'], ids=range(len(BROKEN) + 3))
def test_broken_records_of_checkpoints(text, own, trained, tmp_path, capsys):
    checkpoint_refusal(own, trained, tmp_path, capsys, lambda step: (step / "complete.json").write_text(text))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--optimizer=muon"], "of a run with optimizer adamw, this one has muon; give the flags"),
        (["--algorithm=ppo"], "of a run with recipe grpo, this one has ppo; give the flags"),
        (
            ["--model={own}/wide"],
            "of a run with mlp 128, this one has 8; --model={own}/wide has changed, or is another one: give the model",
        ),
    ],
)
def test_runs_that_are_not_that_of_the_checkpoint(flags, says, own, trained, tmp_path, capsys):
    more = [flag.format(own=own) for flag in flags]
    message = checkpoint_refusal(own, trained, tmp_path, capsys, lambda step: None, *more)
    assert says.format(own=own) in message
