"""What a user gets wrong is said before any work, in a line that names it; what goes wrong later loses nothing."""

import json
import resource
import shutil
import signal
import sys

import pytest
import torch

from funrl.cli.run import main
from funrl.models import decoder_model
from funrl.models.huggingface import directories as hf
from funrl.tasks import arithmetic

REWARDS = """
import os

calls = 0


def fine(prompt, completion):
    return 0.5


def wants_answer(prompt, completion, answer):
    return 0.5


def _late():
    global calls
    calls += 1
    return calls > 2 + 8 * 2  # two of the first evaluation, eight a step: the third step


def nan_at_three(prompt, completion):
    return float("nan") if _late() else 0.5


def leaves_at_three(prompt, completion):
    return os.sys.exit(0) if _late() else 0.5


def fails_on_one_rank(prompt, completion):
    return float("nan") if prompt == "7+7=" else 0.5
"""


@pytest.fixture(autouse=True)
def forget():
    """Every test is as a program of its own: no file has been run yet."""
    yield
    for name in [name for name in sys.modules if name.startswith("funrl_file_")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A folder with a model, prompts and rewards, and with broken ones of each."""
    folder = tmp_path_factory.mktemp("own")
    model, tokenizer = decoder_model(arithmetic.model_config()), arithmetic.tokenizer()
    hf.save(folder / "model", model, model.init(torch.Generator().manual_seed(0)), tokenizer)
    (folder / "empty").mkdir()
    shutil.copytree(folder / "model", folder / "short")
    weights = (folder / "model" / "model.safetensors").read_bytes()
    (folder / "short" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    record = json.loads((folder / "model" / "config.json").read_text())
    for name, architecture in (("mamba", "MambaForCausalLM"), ("unheard", "UnheardForCausalLM")):
        shutil.copytree(folder / "model", folder / name)
        (folder / name / "config.json").write_text(
            json.dumps(record | {"model_type": name, "architectures": [architecture]})
        )
    shutil.copytree(folder / "model", folder / "letters")  # its tokens are not those of the embedded task
    vocabulary = json.loads((folder / "letters" / "tokenizer.json").read_text())
    vocabulary["model"]["vocab"]["a"] = vocabulary["model"]["vocab"].pop("7")
    (folder / "letters" / "tokenizer.json").write_text(json.dumps(vocabulary))
    (folder / "p.jsonl").write_text("".join(f'{{"prompt": "{i}+{i}="}}\n' for i in range(1, 9)))
    (folder / "none.jsonl").write_text("\n")
    (folder / "broken.jsonl").write_text('{"prompt": "1+1="}\n\n{"prompt": "2+2="\n')
    (folder / "lacks.jsonl").write_text('{"prompt": "1+1="}\n{"text": "2+2="}\n')
    (folder / "answer.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (folder / "r.py").write_text(REWARDS)
    (folder / "needs.py").write_text(
        "import no_such_module_anywhere\n\n\ndef fine(prompt, completion):\n    return 0.5\n"
    )
    (folder / "syntax.py").write_text("def score(:\n")
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    for name, tools in {"tool": [tool], "tools": [tool, {"type": "function"}], "no_tools": []}.items():
        (folder / f"{name}.json").write_text(json.dumps(tools))
    (folder / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return folder


TINY = ["--batch_prompts=4", "--samples_per_prompt=2", "--max_new_tokens=4", "--eval_prompts=2", "--device=cpu"]
DATA = ["--model={own}/model", "--prompts={own}/p.jsonl", "--reward={own}/r.py:fine"]

CHAT = "--chat_template={own}/chat.jinja"

BAD = [  # flags, and what the one line says
    (["--mesh=dp3,xx2"], "--mesh=dp3,xx2: 'xx2' is not an axis; write dp, tp, ep or sp and a size"),
    (["--mesh=dp4,tp5"], "--mesh=dp4,tp5: embed: vocab has size 16, which does not divide over tp5"),
    (["--mesh=dp2,dp2"], "axis 'dp' is given twice"),
    (["--mesh=dp0"], "must be at least 1"),
    (["--mesh=sp2", "--generate_mesh=sp2"], "generation does not split the tokens of a row; write dp for sp"),
    (["--mesh=dp2", "--generate_mesh=dp3"], "--generate_mesh=dp3 has 3 devices and --mesh=dp2 has 2"),
    ([*DATA, "--model={own}/nowhere"], "--model: {own}/nowhere is not a directory"),
    ([*DATA, "--model={own}/empty"], "--model: {own}/empty is empty; a model directory has config.json"),
    ([*DATA, "--model={own}/short"], "short/model.safetensors: it is cut short"),
    ([*DATA, "--model={own}/short"], "it is cut short or damaged"),
    ([*DATA, "--model={own}/mamba"], "mamba: 22 tensors are missing, the first is backbone.embeddings.weight"),
    ([*DATA, "--model={own}/mamba", "--model_code=native"], "model_type is 'mamba', supported are ['deepseek_v2', "),
    ([*DATA, "--model={own}/unheard"], "model_type is 'unheard'"),
    (["--model={own}/letters"], "needs --prompts=FILE.jsonl and --reward=FILE.py:function"),
    (DATA[:2], "needs --reward=FILE.py:function"),
    ([DATA[0], DATA[2]], "needs --prompts=FILE.jsonl"),
    ([*DATA, "--prompts={own}/nowhere.jsonl"], "--prompts: {own}/nowhere.jsonl: no such file"),
    ([*DATA, "--prompts={own}/none.jsonl"], "none.jsonl: the file is empty"),
    ([*DATA, "--prompts={own}/broken.jsonl"], "broken.jsonl, line 3: not valid JSON"),
    ([*DATA, "--prompts={own}/lacks.jsonl"], "lacks.jsonl, line 2: there is no field 'prompt'"),
    ([*DATA, "--reward={own}/r.py"], "write FILE.py:function"),
    ([*DATA, "--reward=maths"], "'maths' is not a verifier (exact, gsm8k, "),
    ([*DATA, "--reward=exact@0.5,regex"], "exact needs one of the fields answer, solution, ground_truth, and"),
    ([*DATA, "--reward={own}/gone.py:fine"], "gone.py: no such file"),
    ([*DATA, "--reward={own}/needs.py:fine"], "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
    ([*DATA, "--reward={own}/syntax.py:fine"], 'SyntaxError: invalid syntax ("{own}/syntax.py", line 1)'),
    ([*DATA, "--reward={own}/r.py:fin"], "has no 'fin'; did you mean fine? its functions: fine, wants_answer, "),
    ([*DATA, "--reward={own}/r.py:wants_answer"], "missing a required argument: 'answer'"),
    ([*DATA, "--prompts={own}/answer.jsonl"], "got an unexpected keyword argument 'answer'"),
    ([*DATA, "--max_new_tokens=1000"], "the model has 64 positions"),
    (["--run_dir={own}/p.jsonl/run"], "--run_dir={own}/p.jsonl/run: cannot be created: not a directory"),
    (["--run_dir={own}/p.jsonl"], "--run_dir={own}/p.jsonl: cannot be created: file exists"),
    (["--run_dir={own}/model"], "holds a config.json that no run has written"),
    (["--setps=3"], "--setps is not a flag; did you mean --steps?"),
    (["--data={own}/p.jsonl"], "--data has no effect in reinforcement learning"),
    (["--optimizer=sgd"], "--optimizer=sgd: it must be one of adamw, muon"),
    (["--fsdp_models=policy,2"], "--fsdp_models=policy,2: it must be names such as policy,critic,implicit_reward"),
    (
        ["--lora_rank=4", "--freeze=none"],
        "--freeze=none with --lora_rank=4: adapters learn alone",
    ),
    ([*DATA, "--tools={own}/tools.json", CHAT], 'tool 2 is {{"type": "function"}}; {{"function": {{"name": ...}}}}'),
    ([*DATA, "--tools={own}/no_tools.json", CHAT], "no_tools.json: it has no tool, and does nothing; leave it out"),
    ([*DATA, "--tools={own}/tool.json", CHAT], "tool.json does nothing without a chat template that shows tools"),
    (["--fsdp_models=critic"], "--fsdp_models=critic does nothing without --fsdp; give --fsdp too"),
    (["--reward_lr=1e-3"], "--reward_lr is not a flag; did you mean --"),
    (["--nothing_like_it=3"], "--nothing_like_it is not a flag; --help lists all flags"),
    (["steps=3"], "'steps=3' is not a flag; flags are written --name=value"),
    (["--steps=many"], "--steps=many: a whole number is needed"),
    (["--steps=0"], "--steps=0: it must be at least 1"),
    (["--lr=fast"], "--lr=fast: a number is needed"),
    (["--lr=nan"], "--lr=nan: a finite number is needed"),
    (["--kl_coef=inf"], "--kl_coef=inf: a finite number is needed"),
    (["--temperature=0"], "--temperature=0: it must be at least 1e-05"),
    (["--temperature=1e-46"], "--temperature=1e-46: it must be at least 1e-05"),
    (["--eval_temperature=1e-46"], "--eval_temperature=1e-46: it must be 0, or at least 1e-05"),
    (["--repetition_penalty=1e-46"], "--repetition_penalty=1e-46: it must be at least 1e-10"),
    (["--top_p=1.5"], "--top_p=1.5: it must be above 0 and at most 1"),
    (["--temperature=0.5", "--top_k=4"], "use either a temperature, or top_k at temperature 1"),
    (["--seed=-1"], "--seed=-1: it must be at least 0"),
    (["--minibatches=9"], "--minibatches=9: --batch_prompts x --samples_per_prompt is 8"),
    (["--dtype=float16"], "--dtype=float16: it must be one of auto, float32, float64, bfloat16"),
    (["--lr_schedule=cosine", "--steps=2", "--lr_warmup_steps=4"], "--lr_warmup_steps=4: the run makes 4 updates"),
    (["--lr_schedule=linear", "--steps=2", "--lr_warmup_steps=9"], "--lr_warmup_steps=9: the run makes 4 updates"),
    (["--seed=9223372036854775808"], "--seed=9223372036854775808: it must be at least 0 and below 2^63"),
    (["--reward_weights=0"], "--reward_weights=0: give one number"),
    ([*DATA, "--reward={own}/r.py:fine,{own}/r.py:fine", "--reward_weights=0,-0"], "commas, not all 0"),
    (["--reward_weights=1e300"], "--reward_weights=1e300: give one number for each of the rewards (1)"),
    ([*DATA, "--prompts={own}/model"], "--prompts: {own}/model: this is a directory, and not one that"),
    (["--reward_workers=-1"], "--reward_workers=-1: it must be at least 0 and at most 256"),
    (["--reward_workers=5000"], "--reward_workers=5000: it must be at least 0 and at most 256"),
    (["--stalled_after=0"], "--stalled_after=0: it must be at least 1 and at most 86400"),
    (["--reward_timeout=0"], "--reward_timeout=0: it must be above 0"),
    (["--reward_timeout=5"], "--reward_timeout=5 does nothing without workers that run --reward"),
    ([*DATA, "--reward_timeout=5", "--reward_workers=0"], "workers that run --reward (--reward_workers=1)"),
    (
        [*DATA, "--reward_timeout=120", "--timeout=2", "--mesh=dp2"],
        "--reward_timeout=120: other ranks wait 2 minutes; give a longer --timeout",
    ),
    (["--algorithm={own}/gone.py:fn"], "gone.py: no such file"),
    (["--algorithm=nowhere_at_all:fn"], "--algorithm=nowhere_at_all:fn: nowhere_at_all does not import"),
    (["--algorithm={own}/syntax.py:fn"], "syntax.py does not import: SyntaxError"),
    (["--algorithm=funrl.algos.core"], "write FILE.py:function or module:function"),
    (["--algorithm=funrl.algos.core:chains"], "has no 'chains'; its functions: "),
    (["--algorithm=pppo"], "--algorithm=pppo: no recipe has this name; did you mean ppo?"),
]


def call(flags, own, run_dir):
    """Run ppo; of a flag that is there several times the last one counts."""
    given = [*TINY, f"--run_dir={run_dir}", *(flag.format(own=own) for flag in flags)]
    last = {flag.partition("=")[0]: flag for flag in given}
    return main("ppo", ["ppo", *last.values()])


@pytest.mark.parametrize("flags, says", BAD, ids=[" ".join(f[-2:]) for f, _ in BAD])
def test_bad_input_is_refused_before_any_work(flags, says, own, tmp_path, capsys):
    before = sorted(own.rglob("*"))
    assert call(flags, own, tmp_path / "run") == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert says.format(own=own) in captured.err
    assert "Traceback" not in captured.err
    assert len(captured.err.strip().splitlines()) <= 2
    assert captured.out == ""
    assert not (tmp_path / "run").exists()
    assert [p for p in sorted(own.rglob("*")) if "__pycache__" not in str(p)] == [
        p for p in before if "__pycache__" not in str(p)
    ]


@pytest.mark.slow
def test_the_largest_seed_runs(own, tmp_path, capsys):
    flags = [*DATA, "--steps=1", "--warmstart_steps=0", f"--seed={2**63 - 1}"]
    assert call(flags, own, tmp_path / "run") == 0, capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused(own, tmp_path, capsys):
    assert call(["--device=cuda"], own, tmp_path / "run") == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"error: --device=cuda: torch {torch.__version__}")
    assert errors.endswith("; --device=cpu runs without one\n")


def check_stopped(run_dir, message, prompts):
    """The run stopped after some steps, printed on what, and saved everything that it had learned."""
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert f"results in {run_dir}; open {run_dir / 'report.html'}" in message.out
    assert any(f"prompt: {p!r}" in message.err for p in prompts)
    assert "completion: " in message.err
    model, params = hf.load(run_dir / "model", torch.float32)
    start = model.init(torch.Generator().manual_seed(0))
    return steps, not torch.equal(params["embed"], start["embed"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "function, says",
    [
        ("nan_at_three", "gave nan, a finite number is needed"),
        pytest.param("leaves_at_three", "raised SystemExit(0)", marks=pytest.mark.slow),
    ],
)
def test_a_reward_that_fails_at_step_three_loses_nothing(function, says, own, tmp_path, capsys):
    """The rank runs it, because each worker would count the calls for itself."""
    run_dir = tmp_path / "run"
    assert call([*DATA, f"--reward={own}/r.py:{function}", "--reward_workers=0", "--seed=1"], own, run_dir) == 1
    captured = capsys.readouterr()
    assert says in captured.err
    steps, trained = check_stopped(run_dir, captured, [f"{i}+{i}=" for i in range(1, 9)])
    assert steps == [1, 2]
    assert trained


@pytest.mark.slow
@pytest.mark.gloo
def test_a_reward_that_fails_on_one_rank_stops_both(own, tmp_path, capfd):
    run_dir = tmp_path / "run"
    flags = [*DATA, f"--reward={own}/r.py:fails_on_one_rank", "--eval_prompts=1", "--mesh=dp2", "--generate_mesh=dp2"]
    (own / "late.jsonl").write_text("".join(f'{{"prompt": "{i}+{i}="}}\n' for i in range(1, 15)))
    flags += [f"--prompts={own}/late.jsonl", "--seed=5", "--reward_workers=1"]
    assert call(flags, own, run_dir) == 1
    captured = capfd.readouterr()
    (own / "late.jsonl").unlink()
    assert "gave nan" in captured.err and "Traceback" not in captured.err
    steps, _ = check_stopped(run_dir, captured, ["7+7="])
    assert 1 <= len(steps) < 5


FULL = 13_000  # bytes: config.json fits, and the metrics of a few steps


@pytest.mark.slow
@pytest.mark.gloo
def test_a_full_disk_is_said_in_a_line(own, tmp_path, capfd):
    run_dir = tmp_path / "run"
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL, before[1]))  # a write beyond it fails, as on a full disk
    try:
        status = call([*DATA, "--steps=1000", "--eval_every=1", "--mesh=dp2"], own, run_dir)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    captured = capfd.readouterr()
    assert status == 1
    first, second = captured.err.splitlines()
    assert first == f"error: {run_dir}: cannot be written: file too large"
    assert second.startswith("nor can the state after step ") and "file too large" in second.lower()
    assert (run_dir / "metrics.jsonl").stat().st_size <= FULL
