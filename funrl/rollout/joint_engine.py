"""Several engines as one: each request names the model that answers it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from funrl.rollout.engine import Engine, EngineCost, WeightSpec
from funrl.rollout.requests import Completion, Request

OF_POLICY = ("page_tokens", "rows")  # costs that are the policy's; the others are summed


class JointEngine:
    """An `Engine` of the policy and of frozen models, on one mesh. `Request.model` chooses among them.

    Its weights and their version are the policy's. Each step steps every engine that has an unfinished request.
    """

    def __init__(self, policy: Engine, frozen: Mapping[str, Engine]):
        """Join engines.

        Args:
          policy: answers requests whose model is "".
          frozen: the others by the name of their model, with weights.
        """
        self._policy = policy
        self._engines = {"": policy, **frozen}

    @property
    def weights(self) -> WeightSpec:
        """The form in which the policy's engine takes weights."""
        return self._policy.weights

    @property
    def version(self) -> int | None:
        """Version of the policy's weights."""
        return self._policy.version

    @property
    def paused(self) -> bool:
        """True while `step` does nothing."""
        return self._policy.paused

    def load(self, named_weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        """Replace the policy's weights; see `Engine`."""
        self._policy.load(named_weights, version)

    def held_weights(self) -> Iterable[tuple[str, Tensor | int | None]]:
        """The policy's weights; see `Engine`."""
        return self._policy.held_weights()

    def take_digests(self, digests: Mapping[str, Tensor]) -> None:
        """Take digests of the policy's weights; see `Engine`."""
        self._policy.take_digests(digests)

    def check(self, requests: Sequence[Request]) -> None:
        """Raise what `submit` would raise."""
        by_model = self._by_model(requests)
        for model, engine in self._engines.items():
            engine.check(by_model[model])

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests; see `Engine`.

        Raises:
          ValueError: as each engine raises it, or there is no such model. Then no request is taken.
        """
        self.check(requests)
        for model, some in self._by_model(requests).items():
            self._engines[model].submit(some)

    def step(self) -> list[Completion]:
        """Step every engine that has an unfinished request."""
        return [done for engine in self._engines.values() if engine.unfinished() for done in engine.step()]

    def unfinished(self) -> int:
        """Number of requests that are not finished yet."""
        return sum(engine.unfinished() for engine in self._engines.values())

    def sampled(self, number: int, begin: int = 0) -> list[int]:
        """Token ids of a completion so far; see `Engine`."""
        return next(filter(None, (engine.sampled(number, begin) for engine in self._engines.values())), [])

    def room(self) -> int:
        """Estimated number of further requests that would begin at once, whichever model they name."""
        return min(engine.room() for engine in self._engines.values())

    def reserve(self, tokens: int) -> None:
        """Keep so many tokens of ended requests in each engine, as any of them may have answered them."""
        for engine in self._engines.values():
            engine.reserve(tokens)

    def cancel(self, numbers: Iterable[int]) -> list[Completion]:
        """Cancel requests; see `Engine`."""
        numbers = list(numbers)
        return [done for engine in self._engines.values() for done in engine.cancel(numbers)]

    def pause(self) -> None:
        """Pause all engines."""
        for engine in self._engines.values():
            engine.pause()

    def resume(self) -> None:
        """Resume all engines."""
        for engine in self._engines.values():
            engine.resume()

    def cost(self) -> EngineCost:
        """Sums over the engines; the sizes of a page and of a batch are those of the policy's."""
        costs = [engine.cost() for engine in self._engines.values()]
        sums = {
            name: sum(getattr(cost, name) for cost in costs) for name in EngineCost._fields if name not in OF_POLICY
        }
        return costs[0]._replace(**sums)

    def _by_model(self, requests: Sequence[Request]) -> dict[str, list[Request]]:
        by_model: defaultdict[str, list[Request]] = defaultdict(list)
        for request in requests:
            if request.model not in self._engines:
                raise ValueError(f"request {request.number} names the model {request.model!r}; there is none")
            by_model[request.model].append(request)
        return by_model
