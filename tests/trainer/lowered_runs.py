"""A program: steps of small runs on meshes of JAX's CPU devices against torch's ranks.

    python lowered_runs.py STEPS:RECIPE:MESH...

A mesh is that of --mesh, with "+fsdp" where weights are fully sharded and "+on=MESH" where JAX decodes too, on that
mesh. It prints the largest difference of a metric, relative to the metric where that is above 1, and its name. torch's
runs come first: a fork beside the threads of JAX can wait forever.
"""

import sys

from small_runs import GRPO, MEASURED, PPO, SIZES, begin, one_step, small_job

from funrl.algos.recipes.sft import sft
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.models.decoder.routing import Experts

RECIPES = {"grpo": GRPO, "ppo": PPO, "sft": sft}


def job_of(text, **settings):
    """The job of a recipe and a mesh, in float64."""
    recipe, _, mesh = text.partition(":")
    mesh, *kinds = mesh.split("+")
    engine = [kind.removeprefix("on=") for kind in kinds if kind.startswith("on=")]
    sizes = SIZES | ({"experts": Experts(4, 2, 8)} if mesh.startswith("ep") else {})
    learns = {"reward": None} if recipe == "sft" else {}
    options = {"sizes": sizes, "dtype": "float64", "lr": 1e-2, "mesh": mesh, "fsdp": "fsdp" in kinds}
    if engine:
        options |= {"generate_mesh": engine[0], "compile": "on" if "backend" in settings else "off"}
    return small_job(RECIPES[recipe], **options, **learns, **settings)


def metrics_of(job, mesh, steps):
    """The metrics of some steps."""
    run, state = begin(job, mesh)
    metrics = []
    for _ in range(steps):
        state, numbers = one_step(run, state)
        metrics.append({name: x for name, x in numbers.items() if not name.endswith(MEASURED)})
    for role in run.parts.roles.values():
        if role.loss is not None and role.programs is not None:  # the devices' state is updated where it is
            (update,) = role.programs.programs["update"].compiled.values()
            assert "input_output_alias" in update.run.as_text()
    return metrics


def gap_of(result, wanted):
    """The largest difference of a metric, relative to the metric where that is above 1, and its name."""
    gaps = []
    for want, numbers in zip(wanted, result, strict=True):
        want = {name: x for name, x in want.items() if name != "router/peak_rows"}  # rows have no bound in JAX
        assert numbers.keys() == want.keys(), numbers.keys() ^ want.keys()
        gaps += [(abs(numbers[name] - x) / max(1, abs(x)), name) for name, x in want.items()]
    return max(gaps)


def main(*texts):
    cases = [(text, *text.split(":", 1)) for text in texts]
    wanted = {}
    for text, steps, of in cases:
        job = job_of(of)
        wanted[text] = launch(lambda mesh, job=job, n=int(steps): metrics_of(job, mesh, n), job.sizes, "cpu")
    for text, steps, of in cases:
        metrics = metrics_of(job_of(of, backend="xla"), single(), int(steps))
        print(text, *gap_of(metrics, wanted[text]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
