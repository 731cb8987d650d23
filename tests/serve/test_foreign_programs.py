"""Programs that nobody here wrote, in an environment of their own, as episodes: what they get is what is trained.

`.ci/setup_programs` makes the environment.
"""

import asyncio
import json
import os
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from small_chats import ScriptedEngine
from small_servers import needs_clients

import funrl
from funrl.data.prompts import Prompt, encode
from funrl.environments.chat import TemplateChat
from funrl.environments.run import episode_groups, run_episodes
from funrl.mesh.mesh import SINGLE
from funrl.models import decoder_config, decoder_model
from funrl.models.huggingface import directories
from funrl.rollout.policy import EpisodeLimits, PolicySetup
from funrl.rollout.sampling_parameters import Sampling
from funrl.serve.programs import endpoint_environment

PYTHON = Path(__file__).parents[2] / ".venv-programs/bin/python"
NO_PROGRAMS = None if PYTHON.exists() else "no .venv-programs here: ./test --all makes it"
pytestmark = [needs_clients, pytest.mark.slow, pytest.mark.skipif(NO_PROGRAMS is not None, reason=str(NO_PROGRAMS))]
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>"
    "<|im_end|>\n{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n"
    "{{ m.content }}\n</tool_response>{% else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROGRAMS = {  # program, and further arguments of it
    "agents, chat": ("agents_sdk.py", {"dialect": "chat"}),
    "agents, responses": ("agents_sdk.py", {"dialect": "responses"}),
    "shell agent": ("shell_agent.py", {}),
}


def byte_tokenizer():
    """A tokenizer whose tokens are bytes, and the marks of the template."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(BPE({letter: n for n, letter in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken(mark, normalized=False) for mark in ("<tool_call>", "</tool_call>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|pad|>", additional_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class Process:
    """A program in its own environment, which runs for many episodes at once."""

    def __init__(self, name):
        self.file = Path(__file__).parent / "foreign" / name
        self.process = None
        self.waiting = {}

    def start(self):
        quiet = {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
        }
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [PYTHON, self.file], stdin=pipe, stdout=pipe, text=True, env=variables | quiet, cwd=self.file.parent
        )
        threading.Thread(target=self.receive, daemon=True).start()

    def receive(self):
        for line in self.process.stdout:
            answer = json.loads(line)
            future = self.waiting.pop(answer["number"])
            future.get_loop().call_soon_threadsafe(future.set_result, answer)

    async def __call__(self, further, messages, *, base_url, api_key, model, **fields):
        """Run it for an episode, with further arguments; returns what it returns."""
        if self.process is None:
            self.start()
        future = asyncio.get_running_loop().create_future()
        number = len(self.waiting) + id(future)
        self.waiting[number] = future
        place = {"base_url": base_url, "api_key": api_key, "model": model}
        task = {"number": number, "question": messages[-1]["content"], **place, **further}
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        answer = await future
        if "problem" in answer:
            raise RuntimeError(answer["problem"])
        return answer["result"]

    def end(self):
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait(60)


@pytest.fixture(scope="module")
def processes():
    """The programs by their files; importing them takes most of their time, so that each serves all tests."""
    files = {file for file, _ in PROGRAMS.values()}
    made = {file: Process(file) for file in files}
    yield made
    for process in made.values():
        process.end()


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


SCRIPTS = {  # what the policy replies, and what the program then returns
    "agents, chat": (
        [call("multiply", left=6, right=7), "It is 42.", "Yes."],
        {"texts": ["It is 42.", "Yes."], "outputs": ["42"]},
    ),
    "shell agent": (
        [call("bash", command="echo one two"), call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")],
        {
            "status": "Submitted",
            "submission": "",
            "commands": ["echo one two", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"],
        },
    ),
}
SCRIPTS["agents, responses"] = SCRIPTS["agents, chat"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_calls_tools_and_its_conversation_is_one_trajectory(name, processes):
    tokenizer = byte_tokenizer()
    replies, expected = SCRIPTS[name]
    left = list(replies)
    engine = ScriptedEngine(lambda prompt: left.pop(0), tokenizer=tokenizer, end=tokenizer.eos_token_id)
    file, further = PROGRAMS[name]
    results = []

    async def program(messages, **place):
        results.append(await processes[file](further, messages, **place))
        return 1.0

    setup = PolicySetup(Sampling(max_new_tokens=200, stop=(tokenizer.eos_token_id,)), TemplateChat(tokenizer))
    limits = EpisodeLimits(environment_s=600, retries=0)
    groups = episode_groups([encode(Prompt("What is 6 times 7?", {}), tokenizer)], 1, 0)
    ((_, episode),) = run_episodes(engine, SINGLE, endpoint_environment(program), groups, setup, limits).episodes
    assert episode.status == "done", episode.problem
    (returned,) = results
    assert {**returned, "outputs": [str(x) for x in returned.get("outputs", ())]} == {"outputs": [], **expected}
    (end,) = episode.ends
    sampled = [node for node in end.nodes() if node.sampled]
    assert [tokenizer.decode(node.tokens, skip_special_tokens=True) for node in sampled] == replies
    assert episode.parts == {"forks": 0.0}


@pytest.mark.parametrize("name", ["agents, responses", "shell agent"])
def test_a_random_model_is_trained_on_what_a_program_asked(name, tmp_path, processes):
    tokenizer = byte_tokenizer()
    sizes = {"embed": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head": 8, "mlp": 48, "max_positions": 8192}
    model = decoder_model(decoder_config(vocab=len(tokenizer), **sizes))
    directories.save(tmp_path / "model", model, model.init(torch.Generator().manual_seed(0)), tokenizer)
    file, further = PROGRAMS[name]

    async def program(messages, **place):
        result = await processes[file](further, messages, **place)
        return float(len(json.dumps(result)) % 7)

    run = funrl.train(
        "grpo",
        model=str(tmp_path / "model"),
        prompts=[{"prompt": f"What is {n} times 7?"} for n in range(4)],
        env=endpoint_environment(program),
        run_dir=str(tmp_path / "run"),
        steps=1,
        batch_prompts=2,
        samples_per_prompt=2,
        max_new_tokens=16,
        env_timeout=600,
    )
    (reported,) = run.metrics
    assert reported["episodes/failed"] == 0 and reported["episodes/turns"] >= 2
    assert reported["rollout/logprob_gap_max"] == 0
