"""An agent of OpenAI's Agents SDK with a tool, asked twice; the second time it streams."""

import asyncio

from agents import (
    Agent,
    AgentsException,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from lines import serve
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def multiply(left: int, right: int) -> int:
    """Multiply two whole numbers.

    Args:
        left: the first factor.
        right: the second factor.
    """
    return left * right


async def converse(question, base_url, api_key, model, dialect):
    kind = OpenAIResponsesModel if dialect == "responses" else OpenAIChatCompletionsModel
    texts = []
    outputs = []
    history = [{"role": "user", "content": question}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        agent = Agent(
            name="calculator",
            instructions="Answer in short.",
            model=kind(model=model, openai_client=client),
            model_settings=ModelSettings(max_tokens=200),
            tools=[multiply],
        )
        for run in (whole, stream):
            try:
                result = await run(agent, history)
            except AgentsException:  # of a reply that was cut off, in the dialect of responses
                texts.append(None)
                continue
            texts.append(result.final_output)
            outputs += [item.output for item in result.new_items if item.type == "tool_call_output_item"]
            history = [*result.to_input_list(), {"role": "user", "content": "Are you sure?"}]
    return {"texts": texts, "outputs": outputs}


async def whole(agent, history):
    return await Runner.run(agent, history, max_turns=4)


async def stream(agent, history):
    result = Runner.run_streamed(agent, history, max_turns=4)
    async for _ in result.stream_events():
        pass
    return result


serve(lambda **task: asyncio.run(converse(**task)))
