"""The event loop of an environment of verifiers, whose shared servers may fail to start."""

import asyncio
import contextlib

import pytest

from funrl.foreign.verifiers import _Serving


class Fragile:
    """An environment whose servers start at the third attempt."""

    def __init__(self):
        self.errors = [OSError("no port"), SystemExit(3)]

    @contextlib.asynccontextmanager
    async def serving(self):
        if self.errors:
            raise self.errors.pop(0)
        yield


def test_a_failed_start_fails_its_episode_and_the_next_one_tries_again():
    serving = _Serving(Fragile())

    async def number():
        return 7

    async def main():
        with pytest.raises(OSError, match="no port"):
            await serving.run(number)
        with pytest.raises(RuntimeError, match=r"verifiers raised SystemExit\(3\)"):
            await serving.run(number)
        return await asyncio.gather(serving.run(number), serving.run(number))

    assert asyncio.run(asyncio.wait_for(main(), 30)) == [7, 7]
