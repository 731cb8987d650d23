"""Tools and agent loops of verl, whose files import verl."""

import json
import sys
from pathlib import Path

import pytest
from env_verl import verl_environment
from foreign_runs import LIMITS, call_text, heard, run
from small_chats import SETUP, engine_of, text

from funrl.environments.builtin.load import load_environment
from funrl.loading import LoadError
from funrl.testing import check_environment
from funrl.trainer.jobs.provenance import input_digests
from funrl.trainer.settings.settings import settings_of

ENVIRONMENT = "examples/env_verl.py:verl_environment"
TOOLS = """
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import function_tool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op


class Accumulator(BaseTool):
    objects = []
    released = []

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.totals = {}
        self.objects.append(self)

    async def create(self, instance_id: Optional[str] = None, **kwargs):
        instance_id = instance_id or str(uuid4())
        given = kwargs.get("create_kwargs", {})
        self.totals[instance_id] = [given.get("start", 0), given.get("goal", 10)]
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        if parameters["number"] < 0:
            raise ValueError("negative")
        self.totals[instance_id][0] += parameters["number"]
        return ToolResponse(text=f"total {self.totals[instance_id][0]}"), self.config.get("step_reward", 0.0), {}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        total, goal = self.totals[instance_id]
        return float(total == goal)

    async def release(self, instance_id: str, **kwargs) -> None:
        del self.totals[instance_id]
        self.released.append(instance_id)


class Stuck(Accumulator):
    async def release(self, instance_id: str, **kwargs) -> None:
        await super().release(instance_id)
        raise OSError("it does not let go")


@function_tool("double")
def twice(number: int):
    '''Double a number.

    Args:
        number: which one.
    '''
    return {"doubled": 2 * number}, 0.25


@function_tool
async def name() -> str:
    '''Say a name.'''
    return "Ada"


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "test" and extra_info["index"] == 3
    return {"score": float(solution_str.endswith(ground_truth)), "length": len(solution_str)}
"""
SCHEMA = {
    "type": "function",
    "function": {
        "name": "accumulate",
        "description": "Add to the total.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer", "description": "what to add"}},
            "required": ["number"],
        },
    },
}
LOOP = """
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register


@register("two_turns")
class TwoTurns(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        prompt_ids = await self.ct_build_initial_tokens(kwargs["raw_prompt"])
        most = self.rollout_config.response_length
        first = await self.server_manager.generate(
            request_id="a", prompt_ids=prompt_ids, sampling_params={**sampling_params, "max_tokens": 5}
        )
        between = self.tokenizer.encode(kwargs["between"])
        second = await self.server_manager.generate(
            request_id="a", prompt_ids=prompt_ids + first.token_ids + between, sampling_params=sampling_params
        )
        assert len(second.log_probs) == len(second.token_ids)
        ids = first.token_ids + between + second.token_ids
        mask = [1] * len(first.token_ids) + [0] * len(between) + [1] * len(second.token_ids)
        return AgentLoopOutput(
            prompt_ids=prompt_ids, response_ids=ids[:most], response_mask=mask[:most], num_turns=4, metrics={},
            reward_score=kwargs.get("score"),
        )
"""


@pytest.fixture
def files(tmp_path):
    """A folder with tools, whose module has a name of its own, and their YAML."""
    module = f"tools_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(TOOLS)
    (tmp_path / "loop.py").write_text(LOOP)
    entry = {"class_name": f"{module}.Accumulator", "config": {"type": "native", "step_reward": 0.1}}
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [entry | {"tool_schema": SCHEMA}]}))
    return tmp_path, f"{tmp_path}/{module}.py"


def of_yaml(files, monkeypatch, **arguments):
    folder, _ = files
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return load_environment(ENVIRONMENT, {"name": "tools.yaml", **arguments})


def test_a_tool_of_yaml_is_created_executed_scored_and_released(files, monkeypatch):
    environment = of_yaml(files, monkeypatch)
    kwargs = {"accumulate": {"create_kwargs": {"start": 2, "goal": 7}}}
    calls = [call_text("accumulate", number=4), call_text("accumulate", number=1) + call_text("accumulate", number=-1)]
    episode = run(environment, *calls, "done", extra_info={"tools_kwargs": kwargs})
    assert episode.status == "done" and episode.rewards["policy"] == pytest.approx(1.2)
    assert heard(episode) == ["total 6", "total 7", "Error executing tool 'accumulate': ValueError: negative"]
    assert [round(reward, 6) for reward in episode.turn_rewards.values()] == [0.1, 0.1]
    (tool,) = sys.modules[Path(files[1]).stem].Accumulator.objects
    assert not tool.totals and len(tool.released) == 1
    cut = run(environment, *calls, limits=LIMITS._replace(turns=1), tools_kwargs=kwargs)
    assert (cut.status, cut.rewards["policy"]) == ("turns", 0.1) and len(tool.released) == 2


def test_a_release_that_fails_keeps_no_other_from_its_own(files, monkeypatch):
    folder, file = files
    entry = {"config": {}, "tool_schema": SCHEMA}
    other = SCHEMA | {"function": SCHEMA["function"] | {"name": "stuck"}}
    tools = [entry | {"class_name": f"{Path(file).stem}.{name}"} for name in ("Accumulator", "Stuck", "Accumulator")]
    tools[1]["tool_schema"] = other
    tools[2]["tool_schema"] = SCHEMA | {"function": SCHEMA["function"] | {"name": "last"}}
    (folder / "tools.yaml").write_text(json.dumps({"tools": tools}))
    environment = of_yaml(files, monkeypatch)
    episode = run(environment, "done")
    assert episode.status == "failed" and "it does not let go" in episode.problem
    tools = sys.modules[Path(file).stem].Accumulator.objects
    assert len(tools) == 3 and not any(tool.totals for tool in tools)


def test_a_reward_function_replaces_what_tools_give(files, monkeypatch):
    _, file = files
    environment = of_yaml(files, monkeypatch, reward=f"{file}:compute_score")
    row = {"data_source": "test", "ground_truth": "7", "extra_info": {"index": 3}}
    episode = run(environment, call_text("accumulate", number=7), "it is 7", **row)
    assert episode.rewards == {"policy": 1.0} and episode.turn_rewards == {}
    assert run(environment, "it is 8", **row).rewards == {"policy": 0.0}


def test_functions_are_tools_whose_rewards_count(files):
    _, file = files
    environment = verl_environment(f"{file}:twice")
    episode = run(environment, call_text("double", number=4), "8")
    assert heard(episode) == ['{"doubled": 8}'] and episode.rewards == {"policy": 0.25}
    assert run(environment, "8").rewards == {"policy": None}  # nothing has scored it
    episode = run(verl_environment(f"{file}:name"), call_text("name"), "8")
    assert heard(episode) == ["Ada"] and episode.rewards == {"policy": None}


def test_an_agent_loop_generates_by_the_policy(files):
    folder, _ = files
    environment = verl_environment(f"{folder}/loop.py:TwoTurns")
    episode = run(environment, engine=engine_of(), setup=SETUP, between="so", score=0.5)
    nodes = list(episode.ends[0].nodes())
    assert [node.sampled for node in nodes] == [False, True, False, True]
    assert text(nodes[0].tokens) == "u>go</s>\na>" and text(nodes[2].tokens) == "so"
    assert len(nodes[1].tokens) <= 5 and episode.rewards == {"policy": 0.5}
    assert nodes[0].messages == [{"role": "user", "content": "go"}]
    assert run(environment, engine=engine_of(), setup=SETUP, between="so").rewards == {"policy": None}
    limited = run(environment, "yes", limits=LIMITS._replace(turns=1), between="so", score=1.0)
    assert (limited.status, limited.rewards) == ("turns", {"policy": None})


def test_a_response_that_the_loop_cuts_off_is_trained_as_it_was_sampled(files):
    folder, _ = files
    environment = verl_environment(f"{folder}/loop.py:TwoTurns", config={"response_length": 7})
    episode = run(environment, "yes!", "no, never", between="so", score=1.0)
    assert text(list(episode.ends[0].nodes())[3].tokens) == "no, never</s>"


@pytest.mark.parametrize(
    "given,problem",
    [(int, "class int has neither execute, as a BaseTool, nor run"), ([3], "3 is no tool of verl")],
)
def test_what_is_no_environment_of_verl_is_refused(given, problem):
    with pytest.raises(TypeError, match=problem):
        verl_environment(given)


def test_files_that_cannot_be_used_are_named(tmp_path, monkeypatch):
    (tmp_path / "a.yaml").write_text("tools: 3")
    (tmp_path / "b.yaml").write_text("tools: [{class_name: a.B, config: {type: mcp}}]")
    (tmp_path / "c.py").write_text("from verl.utils.reward_score import gsm8k\nx = gsm8k")
    for name, problem in (
        ("a.yaml", "a list `tools` is needed"),
        ("b.yaml", "a.B is of type 'mcp'; only native tools are served"),
        ("none.yaml", "cannot be read: No such file"),
        ("c.py:x", "this needs verl itself: pip install --no-deps verl"),
    ):
        with pytest.raises(LoadError, match=problem):
            load_environment(ENVIRONMENT, {"name": f"{tmp_path}/{name}"})


def test_a_changed_file_that_an_argument_names_has_another_digest(files):
    _, file = files
    settings = settings_of(env=ENVIRONMENT, env_args=f"name:{file}:twice")
    digests = []
    for source in (TOOLS, TOOLS + "\n# changed"):
        Path(file).write_text(source)
        digests.append(input_digests(settings, None)["env_args"])
    assert digests[0] != digests[1]


@pytest.mark.slow
def test_properties_of_environments(files, monkeypatch):
    environment = of_yaml(files, monkeypatch)
    replies = [call_text("accumulate", number=3), call_text("accumulate", number=-3)]
    check_environment(environment, replies=replies)
    loop = verl_environment(f"{files[0]}/loop.py:TwoTurns")
    check_environment(loop, examples=[("go", {"between": "so", "score": 1.0})])
