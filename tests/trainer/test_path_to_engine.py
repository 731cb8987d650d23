"""The length of the path from a source's rows to the engine's step."""

import traceback

from funrl.mesh.mesh import single
from tests.trainer.small_runs import GRPO, begin, small_job

MOST_FUNCTIONS = 5


def test_at_most_five_functions_stand_between_the_source_and_the_engines_step():
    run, state = begin(small_job(GRPO), single())
    engine = run.parts.generator.engine
    step = engine.step
    paths = []

    def recorded_step():
        paths.append([frame.name for frame in traceback.extract_stack()])
        return step()

    engine.step = recorded_step
    run.source.next_rows(state.source, 1)
    below = {tuple(path[path.index("next_rows") + 1 : -1]) for path in paths}
    assert below == {("sampling_rounds", "rewarded_rows", "rollout", "complete_shared")}
    assert all(1 + len(path) <= MOST_FUNCTIONS for path in below)
