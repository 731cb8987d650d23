"""A model behind an HTTP endpoint: `funrl serve MODEL`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from funrl.cli.evaluate import launched, settings_of_stored
from funrl.cli.inference_flags import SERVE, USAGES, inference_flags
from funrl.cli.line import read_words
from funrl.mesh.mesh import Mesh
from funrl.processes.workers import stops_when_asked
from funrl.rewards.pool import Pool
from funrl.rollout.engine import onload_engine
from funrl.rollout.policy import EpisodeLimits, Policy, PolicySetup
from funrl.rollout.requests import request_seed
from funrl.rollout.resident import ResidentEngine, run_beside
from funrl.serve.asks import Ask
from funrl.serve.endpoint import KEPT_EXCHANGES, check_installed, listening_socket, serve_until_stopped, speech_of
from funrl.serve.session import Session, choices_of
from funrl.trainer.checkpoints.stored_models import StoredModel, find_stored_model
from funrl.trainer.inference import build_with_weights, prepare_inference
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.jobs.row_source import chat_of
from funrl.trainer.jobs.sharding import replica_sizes
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.scorers import Given

CHECKED = [{"prompt": "?"}]  # a prompt by which tokenizer and model are checked before ranks are started
MOST_TURNS = 1 << 20


class Served(NamedTuple):
    """Task of the ranks.

    Attributes:
      name: of the model, for clients.
      address: host and port.
      key: "": a new one.
      bound: tokens of a reply; None: as many as the model has positions for.
    """

    job: RLJob
    stored: StoredModel
    name: str
    address: tuple[str, int]
    key: str
    bound: int | None


def serve_command(argv: Sequence[str]) -> int:
    """Serve a model until it is interrupted; return the exit status."""
    usage = USAGES["serve"]
    words, line = read_words(inference_flags("serve"), argv, f"{usage}; funrl serve --help lists the flags", most=1)
    own = {flag.name for flag in SERVE}
    chosen = {flag: line.values[flag] for flag in sorted(line.given) if flag not in own}
    check_installed()
    listening_socket(line.values["host"], line.values["port"]).close()
    step = chosen.pop("step", None)
    seed = chosen.pop("seed", 0)
    stored = find_stored_model(words[0], step)
    given = Given(rewards=(), eval_records=CHECKED)
    # Without a bound, the positions that a prompt leaves are one. The engine has the mesh that is named.
    implied = {"max_new_tokens": 1, "temperature": 1.0, "generate_mesh": chosen.get("mesh")}
    settings = settings_of_stored("generate", stored, implied | chosen, given, seed)
    job = prepare_inference(settings, stored, given)
    sizes = replica_sizes(job.settings, job.generate_sizes)
    replicas = [axis for axis in ("data", "sequence", "expert") if sizes[axis] > 1]
    if replicas:
        raise SettingsError(f"--mesh has several replicas ({', '.join(replicas)}); a server has one: --mesh=tpN or epN")
    served = Served(
        job,
        stored,
        name=Path(words[0]).name or words[0],
        address=(line.values["host"], line.values["port"]),
        key=line.values["api_key"] or os.environ.get("FUNRL_API_KEY", ""),
        bound=chosen.get("max_new_tokens"),
    )
    launched(functools.partial(_serve, served), job)
    return 0


def _serve(served: Served, mesh: Mesh, pool: Pool | None) -> None:
    """Serve on the first rank; the others compute with it. Collective."""
    job = served.job
    parts = build_with_weights(job, served.stored, mesh, functools.partial(print, file=sys.stderr))
    engine = parts.generator.engine
    positions = job.model.config.max_positions
    sampling = dataclasses.replace(job.eval_sampling, samples=1, max_new_tokens=served.bound or positions)
    chat = chat_of(job)
    speech = speech_of(chat)
    limits = EpisodeLimits(turns=MOST_TURNS, length=positions)

    def ready(url: str, key: str) -> None:
        print(f"{served.name} is served at {url}/v1\nkey: {key}", flush=True)

    async def main(resident: ResidentEngine) -> None:
        numbers = itertools.count()

        def policy_for(ask: Ask) -> Policy:
            # With a seed of its own, an equal request has equal replies; else each is another one.
            number = 0 if ask.seed is not None else 1 + next(numbers)
            setup = PolicySetup(choices_of(ask.sampling, sampling), chat)
            return Policy(resident.ask, setup, request_seed(job.settings.run.seed, number), limits)

        await serve_until_stopped(
            Session(policy_for, speech, kept=KEPT_EXCHANGES, length=positions),
            speech.decode,
            model=served.name,
            address=served.address,
            key=served.key,
            ready=ready,
        )

    with (
        onload_engine(engine),
        stops_when_asked(),
    ):  # so that the other ranks compute until the first has ended its connections
        run_beside(engine, parts.generator.mesh, main, lasting=True)
