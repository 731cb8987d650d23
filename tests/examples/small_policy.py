"""A policy whose agents say given texts."""

from funrl.rollout.episodes import Node, Reply, Trajectory
from funrl.rollout.policy import LimitReached


class Scripted:
    """A policy that records what each agent hears before it speaks."""

    def __init__(self, **texts):
        self.texts = {agent: list(lines) for agent, lines in texts.items()}
        self.heard = []

    def start(self, messages, tools=(), agent="policy"):
        return Trajectory(agent, Node(None, [1], sampled=False, messages=messages), tools)

    def extend(self, trajectory, messages):
        return Trajectory(trajectory.agent, Node(trajectory.leaf, [1], sampled=False, messages=messages))

    def answered(self, answer): ...

    async def sample(self, trajectory):
        self.heard.append((trajectory.agent, trajectory.leaf.messages[-1]["content"]))
        if not self.texts[trajectory.agent]:
            raise LimitReached("tokens", "no more")
        message = {"role": "assistant", "content": self.texts[trajectory.agent].pop(0)}
        node = Node(trajectory.leaf, [2], sampled=True, messages=(message,))
        return Reply(message, (), (), [2], "stop"), Trajectory(trajectory.agent, node)
