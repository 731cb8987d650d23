"""What OpenTelemetry and Prometheus see of a run: real exporters against servers on loopback, and one in memory."""

import http.server
import json
import threading
import types
import urllib.request
from pathlib import Path

import pytest
from free_ports import free_port
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import funrl
from funrl.cost.tracing.tool_trace import read_trace
from funrl.processes import heartbeat, spans
from funrl.track.observe import RunObserver
from funrl.track.records.run_directory import open_run
from funrl.track.records.services import TrackerError, open_service, prometheus
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import check_values, settings_of


@pytest.fixture
def collector(monkeypatch):
    """Requests that an OTLP collector on loopback has received: messages by path."""
    received = {"/v1/traces": [], "/v1/metrics": []}
    kinds = {"/v1/traces": ExportTraceServiceRequest, "/v1/metrics": ExportMetricsServiceRequest}

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received[self.path].append(kinds[self.path].FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        yield received
        server.shutdown()
        thread.join()


def _spans(received):
    return [
        x for message in received["/v1/traces"] for r in message.resource_spans for s in r.scope_spans for x in s.spans
    ]


def _gauges(received):
    """Last value of each metric."""
    resources = (r for message in received["/v1/metrics"] for r in message.resource_metrics)
    metrics = (metric for resource in resources for scope in resource.scope_metrics for metric in scope.metrics)
    return {metric.name: metric.gauge.data_points[-1].as_double for metric in metrics}


@pytest.mark.slow
def test_a_run_exports_its_phases_groups_episodes_turns_and_metrics(collector, tmp_path):
    flags = {"task": "calculator", "steps": 2, "batch_prompts": 2, "samples_per_prompt": 2, "report_to": "otel"}
    run = funrl.train("grpo", **flags, run_dir=str(tmp_path / "run"))
    exported = _spans(collector)
    names = {span.name for span in exported}
    assert names >= {"generate", "update_policy", "reshard", "group", "episode", "turn"}
    by_id = {span.span_id: span for span in exported}
    turn = next(span for span in exported if span.name == "turn")
    assert by_id[turn.parent_span_id].name == "episode"
    assert by_id[by_id[turn.parent_span_id].parent_span_id].name == "group"
    steps = {a.value.int_value for span in exported if span.name == "update_policy" for a in span.attributes}
    assert steps == {1, 2}
    (resource, *_) = collector["/v1/traces"][0].resource_spans
    assert {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"] == "funrl"
    sums = _gauges(collector)
    assert sums["funrl.reward.mean"] == run.metrics[-1]["reward/mean"]
    trace = tmp_path / "trace.jsonl"  # as a collector writes it
    trace.write_text("".join(json.dumps(MessageToDict(message)) + "\n" for message in collector["/v1/traces"]))
    episodes = read_trace(trace)
    assert len(episodes) == len([span for span in exported if span.name == "episode"]) >= 8
    assert sum(episode.replies for episode in episodes) == len([span for span in exported if span.name == "turn"])
    assert all(0 < episode.seconds < 60 for episode in episodes)


@pytest.mark.slow
def test_groups_of_completions_are_spans_of_their_generation(collector, tmp_path):
    flags = {"steps": 1, "batch_prompts": 2, "samples_per_prompt": 2, "eval_prompts": 2, "warmstart_steps": 0}
    funrl.train("grpo", **flags, report_to="otel", device="cpu", run_dir=str(tmp_path / "run"))
    exported = _spans(collector)
    by_id = {span.span_id: span for span in exported}
    groups = [span for span in exported if span.name == "group"]
    parents = [by_id[span.parent_span_id].name for span in groups]
    assert parents.count("generate") == 2 and "reshard" in {span.name for span in exported}
    firsts = {a.value.int_value for span in groups for a in span.attributes if a.key == "funrl.first"}
    assert firsts >= {0, 2}


def test_a_metric_of_any_name_is_exported(collector, tmp_path):
    remarks = []
    tracker = open_service("otel", open_run(tmp_path / "run", "ppo", {}), remarks.append)
    tracker.write(1, {"eval/pass@4": 0.5, "eval/my set/reward": 0.25})
    tracker.close()
    expected = {"funrl.step": 1.0, "funrl.eval.pass_4": 0.5, "funrl.eval.my_set.reward": 0.25}
    assert not remarks and _gauges(collector) == expected


def test_spans_nest_and_have_the_step_and_end_with_their_context():
    exporter = InMemorySpanExporter()
    with spans.spans_exported(3, "runs/x", exporter):
        heartbeat.at_step(7)
        with heartbeat.phase("generate"), spans.span("group", first=4):
            pass
    with spans.span("nothing"):
        pass
    inner, outer = exporter.get_finished_spans()
    assert (inner.name, outer.name) == ("group", "generate")
    assert inner.parent.span_id == outer.context.span_id
    assert dict(inner.attributes) == {"funrl.first": 4, "funrl.step": 7}
    assert inner.resource.attributes["funrl.rank"] == 3 and inner.resource.attributes["funrl.run"] == "runs/x"


def test_prometheus_reads_the_newest_metrics_of_a_run(tmp_path):
    port = free_port(20000, 20100)
    open_run(tmp_path / "run", "ppo", {})
    settings = settings_of(metrics_port=str(port))
    job = types.SimpleNamespace(settings=settings, task=types.SimpleNamespace(name="sums"))
    for _ in range(2):  # the port is free again
        with RunObserver(job, str(tmp_path / "run"), 0) as observer:
            observer.step(1, {"reward/mean": 0.25, "eval/pass@4": 1.0}, {})
            observer.step(2, {"reward/mean": 0.5}, {})
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                lines = answer.read().decode().splitlines()
            for line in Path("/proc/net/tcp").read_text().splitlines():  # of this machine alone
                local = line.split()[1]
                assert not local.endswith(f":{port:04X}") or local.startswith("0100007F"), line
            with pytest.raises(TrackerError, match=rf"--metrics_port={port}: .*in use.*; give a free port"):
                prometheus(str(port))
        values = dict(line.split(" ") for line in lines if not line.startswith("#"))
        assert values | {"funrl_step": "2.0", "funrl_reward_mean": "0.5", "funrl_eval_pass_4": "1.0"} == values


def test_a_port_is_checked_before_a_run():
    with pytest.raises(SettingsError, match="--metrics_port=http: it must be a port, such as 9100"):
        check_values(settings_of(metrics_port="http"))
    for port in ("0", "[::1]:99999"):
        with pytest.raises(SettingsError, match="it must be a port, such as 9100"):
            check_values(settings_of(metrics_port=port))
