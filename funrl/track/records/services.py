"""Trackers of other packages: wandb, mlflow and OpenTelemetry, each imported where it is used; and Prometheus.

A service's own environment variables give its address, its project, and whether it is used at all
(WANDB_MODE=offline). The identity that a service gives a run is kept in trackers.json of the run
directory, so that a resumed run continues under it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping

from funrl.processes.spans import SERVICE, close_provider, resource_of
from funrl.track.records.run_directory import RunDirectory, write_text
from funrl.track.records.trackers import StepMetrics, Tracker

PROJECT = "funrl"  # where no variable of the environment names one


class TrackerError(ValueError):
    """A tracker that cannot be opened; the message names it and its error."""


def open_service(name: str, run: RunDirectory, note: Callable[[str], None]) -> Tracker:
    """Open one of `SERVICES` for a run. A later failure is reported once, and the run continues without the service.

    Args:
      name: of the package.
      run: its config.json, or the record of the present start, gives the flags; its name is the run's.
      note: receives the message of a failure.

    Raises:
      TrackerError: it is not installed, or refuses.
    """
    record = run.start if run.start.exists() else run.config
    flags = json.loads(record.read_bytes()).get("flags", {})
    known = json.loads(run.trackers.read_bytes()) if run.trackers.exists() else {}
    try:
        service, identity = SERVICES[name](run, flags, known.get(name))
    except ImportError as error:
        raise TrackerError(f"--report_to={name}: {name} is not installed (pip install {name}): {error}") from error
    except Exception as error:
        raise TrackerError(f"--report_to={name}: {type(error).__name__}: {error}") from error
    write_text(run.trackers, json.dumps(known | {name: identity}) + "\n")
    failed = False

    def write(step: int, metrics: StepMetrics) -> None:
        nonlocal failed
        if failed:
            return
        try:
            service.write(step, {key: float(x) for key, x in metrics.items() if math.isfinite(x)})
        except Exception as error:  # of a network or a server: the run's own files have everything
            failed = True
            note(f"{name}: {type(error).__name__}: {error}; nothing goes there from step {step} on")

    def close() -> None:
        with contextlib.suppress(Exception):
            service.close()

    return Tracker(write, close)


def _wandb(run: RunDirectory, flags: Mapping[str, object], identity: str | None) -> tuple[Tracker, str]:
    import wandb  # type: ignore[import-not-found]

    active = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=_name(run),
        id=identity,
        resume="allow",
        config=dict(flags),
        dir=str(run.path),
    )
    return Tracker(lambda step, metrics: active.log(metrics, step=step), active.finish), active.id


def _mlflow(run: RunDirectory, flags: Mapping[str, object], identity: str | None) -> tuple[Tracker, str]:
    import mlflow  # type: ignore[import-not-found]

    if identity is None:
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
    active = mlflow.start_run(run_id=identity, run_name=None if identity else _name(run))
    if identity is None:
        mlflow.log_params({key: str(value)[:500] for key, value in flags.items()})
    return Tracker(lambda step, metrics: mlflow.log_metrics(metrics, step=step), mlflow.end_run), active.info.run_id


def _otel(run: RunDirectory, flags: Mapping[str, object], identity: str | None) -> tuple[Tracker, str]:
    """Gauges by OTLP over HTTP every OTEL_METRIC_EXPORT_INTERVAL milliseconds, with the step as one of them."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    reader = PeriodicExportingMetricReader(OTLPMetricExporter())
    provider = MeterProvider([reader], resource_of(0, str(run.path)), shutdown_on_exit=False)
    meter = provider.get_meter(SERVICE)

    def write(step: int, metrics: StepMetrics) -> None:
        for name, value in {"step": step, **metrics}.items():
            meter.create_gauge("funrl." + re.sub(r"[^A-Za-z0-9_.-]", "_", name.replace("/", "."))).set(float(value))

    return Tracker(write, lambda: close_provider(provider)), identity or ""


def prometheus(address: str) -> Tracker:
    """Serve the newest metrics as Prometheus reads them, at http://HOST:PORT/metrics.

    Args:
      address: PORT on 127.0.0.1, or HOST:PORT.

    Raises:
      TrackerError: nothing can be served there.
    """
    from prometheus_client import CollectorRegistry, Gauge, start_http_server

    host, _, port = address.rpartition(":")
    registry = CollectorRegistry()
    gauges: dict[str, Gauge] = {}
    try:
        server, thread = start_http_server(int(port), host.strip("[]") or "127.0.0.1", registry)
    except (OSError, OverflowError) as error:
        raise TrackerError(f"--metrics_port={address}: {error}; give a free port of this machine") from error

    def write(step: int, metrics: StepMetrics) -> None:
        for name, value in {"step": step, **metrics}.items():
            key = "funrl_" + re.sub(r"\W", "_", name)
            if key not in gauges:
                gauges[key] = Gauge(key, f"{name} of the newest step", registry=registry)
            gauges[key].set(value)

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return Tracker(write, close)


def _name(run: RunDirectory) -> str:
    return run.path.resolve().name


SERVICES = {"wandb": _wandb, "mlflow": _mlflow, "otel": _otel}
