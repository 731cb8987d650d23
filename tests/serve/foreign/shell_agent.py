"""mini-swe-agent, whose model has a tool `bash`. Its commands are listed; only `echo` is executed."""

import re

from lines import serve
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel


class EchoOnly(LocalEnvironment):
    """A shell that executes nothing but `echo` with words."""

    def __init__(self):
        super().__init__(timeout=10)
        self.commands = []

    def execute(self, action, cwd="", **named):
        self.commands.append(action["command"])
        if not re.fullmatch(r"echo [\w .]*", action["command"]):
            return {"output": "not allowed", "returncode": 1, "exception_info": ""}
        return super().execute(action, cwd, **named)


def solve(question, base_url, api_key, model):
    shell = EchoOnly()
    kwargs = {"api_base": base_url, "api_key": api_key, "max_tokens": 200}
    client = LitellmModel(model_name=f"openai/{model}", model_kwargs=kwargs, cost_tracking="ignore_errors")
    agent = DefaultAgent(
        client,
        shell,
        system_template="You solve tasks with bash.",
        instance_template="{{task}}",
        step_limit=4,
        max_consecutive_format_errors=3,
    )
    ended = agent.run(question)
    return {"status": ended["exit_status"], "submission": ended["submission"], "commands": shell.commands}


serve(solve)
