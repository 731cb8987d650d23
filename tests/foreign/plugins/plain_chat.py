"""A harness of verifiers in this process: a chat of some turns."""

import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult

__all__ = ["PlainChat"]


class PlainChatConfig(vf.HarnessConfig):
    turns: int = 1


class PlainChat(vf.Harness[PlainChatConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    SUPPORTS_RESUME = True

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        elif prompt is not None:
            messages += [message_to_wire(message) for message in prompt]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for turn in range(self.config.turns):
                try:
                    done = await client.chat.completions.create(model=ctx.model, messages=messages)
                except openai.APIStatusError as error:
                    return ProgramResult(0 if turn else 1, "", str(error))
                messages.append({"role": "assistant", "content": done.choices[0].message.content or ""})
                messages.append({"role": "user", "content": "again"})
        return ProgramResult(0, "", "")
