"""The part of verl that tools and agent loops import, for where verl is not installed: it pins an older transformers.

After `import verl_modules`, as in env_verl.py, a file with `from verl.tools.base_tool import BaseTool` imports.
The classes have the attributes and methods that environments use, and nothing of verl's trainer. For verl 0.9.1.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar
from uuid import uuid4

from funrl.environments.adapters import tool_schema


class Record:
    """Values by keyword, as in verl's records; unknown ones are left out, and a nested mapping becomes a record."""

    nested: ClassVar[Mapping[str, type[Record]]] = {}
    defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, **values: Any):
        self._given = tuple(values)
        for name, default in self.defaults.items():
            value = values.get(name, copy.deepcopy(default))
            kind = self.nested.get(name)
            setattr(self, name, kind(**value) if kind is not None and isinstance(value, Mapping) else value)

    @classmethod
    def model_validate(cls, value: Any) -> Any:
        """The record of a mapping."""
        return cls(**value) if isinstance(value, Mapping) else value

    def model_dump(self, *, exclude_unset: bool = False, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        """The values as a dict."""
        values = {name: _dumped(getattr(self, name)) for name in self.defaults}
        return {
            name: value
            for name, value in values.items()
            if (name in self._given or not exclude_unset) and (value is not None or not exclude_none)
        }


class OpenAIFunctionPropertySchema(Record):
    """Schema of an argument."""

    defaults: ClassVar = {"type": "string", "description": None, "enum": None}


class OpenAIFunctionParametersSchema(Record):
    """Schema of the arguments."""

    defaults: ClassVar = {"type": "object", "properties": {}, "required": []}


class OpenAIFunctionSchema(Record):
    """Schema of a function."""

    nested: ClassVar = {"parameters": OpenAIFunctionParametersSchema}
    defaults: ClassVar = {"name": "", "description": "", "parameters": {}, "strict": False}


class OpenAIFunctionToolSchema(Record):
    """Schema of a tool."""

    nested: ClassVar = {"function": OpenAIFunctionSchema}
    defaults: ClassVar = {"type": "function", "function": {}}


class ToolResponse(Record):
    """Result of a call."""

    defaults: ClassVar = {"text": None, "image": None, "video": None}


class TokenOutput(Record):
    """A reply in token ids."""

    defaults: ClassVar = {
        "token_ids": [],
        "log_probs": None,
        "routed_experts": None,
        "stop_reason": None,
        "num_preempted": None,
        "extra_fields": {},
    }


class AgentLoopMetrics(Record):
    """Seconds of an agent loop."""

    defaults: ClassVar = {"generate_sequences": 0.0, "tool_calls": 0.0, "compute_score": 0.0, "num_preempted": -1}


class AgentLoopOutput(Record):
    """Record of a conversation in token ids."""

    nested: ClassVar = {"metrics": AgentLoopMetrics}
    defaults: ClassVar = {
        "prompt_ids": [],
        "response_ids": [],
        "response_mask": [],
        "response_logprobs": None,
        "routed_experts": None,
        "multi_modal_data": None,
        "reward_score": None,
        "num_turns": 0,
        "metrics": {},
        "extra_fields": {},
        "mm_processor_kwargs": None,
        "mm_processor_output": None,
    }


class BaseTool:
    """A tool with state of an episode."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None):
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name  # pyright: ignore[reportAttributeAccessIssue]

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Schema of a tool whose YAML has none."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin an episode."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Run a call."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Reward at the end of the episode."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End the episode."""


class FunctionTool:
    """A function as a tool, with its name and schema."""

    def __init__(self, name: str, fn: Callable[..., Any], tool_schema: OpenAIFunctionToolSchema):
        self.name = name
        self.fn = fn
        self.tool_schema = tool_schema


FUNCTION_TOOL_REGISTRY: dict[str, FunctionTool] = {}


def function_tool(name: Any = None, *, schema: Any = None) -> Any:
    """Decorator of a function that becomes a tool."""

    def decorated(function: Callable[..., Any], named: str | None) -> Callable[..., Any]:
        own = schema or tool_schema(function)
        if named is not None and schema is None:
            own["function"]["name"] = named
        described = OpenAIFunctionToolSchema.model_validate(own)
        title = named or function.__name__
        FUNCTION_TOOL_REGISTRY[title] = FunctionTool(title, function, described)
        return function

    if callable(name):
        return decorated(name, None)
    return lambda function: decorated(function, name)


class AgentLoopBase:
    """Base of an agent loop. What it renders, it renders by the run's chat template."""

    def __init__(self, trainer_config: Any, server_manager: Any, tokenizer: Any, processor: Any = None, **kwargs: Any):
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.loop = asyncio.get_running_loop()

    async def ct_build_initial_tokens(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, **_: Any
    ) -> list[int]:
        """Token ids of a conversation, up to the policy's turn."""
        return self.server_manager.replies.begin(messages, tools or ())

    async def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, **_: Any
    ) -> list[int]:
        """As `ct_build_initial_tokens`, by the name of earlier versions."""
        return await self.ct_build_initial_tokens(messages, tools)

    async def process_multi_modal_info(self, messages: Any) -> dict[str, Any]:
        """Pictures of messages; there are none."""
        return {}

    process_vision_info = process_multi_modal_info

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Run an episode."""
        raise NotImplementedError(f"{type(self).__name__} has no run")


AGENT_LOOPS: dict[str, type] = {}


def register(agent_name: str) -> Callable[[type], type]:
    """Decorator of an agent loop with a name."""

    def decorated(kind: type) -> type:
        AGENT_LOOPS[agent_name] = kind
        return kind

    return decorated


def rollout_trace_op(function: Any) -> Any:
    """Decorator of a traced function; nothing is traced."""
    return function


SCHEMAS = (
    OpenAIFunctionPropertySchema,
    OpenAIFunctionParametersSchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    ToolResponse,
)
LOOPS = (AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register)
VERL_MODULES: Mapping[str, Sequence[Any]] = {
    "verl.tools.schemas": SCHEMAS,
    "verl.tools.base_tool": (BaseTool, *SCHEMAS),
    "verl.tools.function_tool": (FunctionTool, function_tool, *SCHEMAS),
    "verl.utils.rollout_trace": (rollout_trace_op,),
    "verl.workers.rollout.replica": (TokenOutput,),
    "verl.experimental.agent_loop.agent_loop": LOOPS,
    "verl.experimental.agent_loop": LOOPS,
}


def provide_verl() -> None:
    """Make `import verl.tools.base_tool` and the like work where verl is not installed; verl itself comes first."""
    if importlib.util.find_spec("verl") is not None:
        return
    for name, members in VERL_MODULES.items():
        module = _module(name)
        vars(module).update({member.__name__: member for member in members})
    vars(_module("verl.tools.function_tool"))["FUNCTION_TOOL_REGISTRY"] = FUNCTION_TOOL_REGISTRY


def _module(name: str) -> ModuleType:
    """A module of a name, with its parent packages."""
    if name not in sys.modules:
        module = ModuleType(name, "Of funrl, for environments of verl.")
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module
        outer, _, inner = name.rpartition(".")
        if outer:
            setattr(_module(outer), inner, module)
    return sys.modules[name]


def _dumped(value: Any) -> Any:
    if isinstance(value, Record):
        return value.model_dump(exclude_none=True)
    if isinstance(value, Mapping):
        return {key: _dumped(inner) for key, inner in value.items()}
    return value


provide_verl()
