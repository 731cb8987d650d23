"""An engine that writes what a test says, when it says so."""

from types import SimpleNamespace

import torch

from funrl.rollout.requests import Completion


class ScriptedEngine:
    """Completes one request a step.

    Args:
      write: request -> token ids; it may wait before it gives them.
      stop: id of the token that ends a completion.
      order: sorts the requests of a submission.
    """

    weights, version, paused = SimpleNamespace(dtype=torch.float64), 0, False

    def __init__(self, write, stop=None, order=None):
        self.write, self.stop, self.order, self.waiting = write, stop, order, []

    def submit(self, requests):
        self.waiting += sorted(requests, key=self.order) if self.order else requests

    def step(self):
        if not self.waiting:
            return []
        request = self.waiting.pop(0)
        tokens = torch.tensor(self.write(request), dtype=torch.int64)
        logp = -tokens.double() / 3
        finish = "stop" if len(tokens) and tokens[-1] == self.stop else "length"
        return [Completion(request.number, tokens, logp, 2 * logp, torch.zeros_like(tokens), finish)]

    def unfinished(self):
        return len(self.waiting)

    def room(self):
        return 0 if self.waiting else 2

    def cancel(self, numbers):
        self.waiting = []
        return []
