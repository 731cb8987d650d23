"""`funrl watch`: the report of a run under way, over a real socket."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest

from funrl.track import live_report
from funrl.track.live_report import LivePage, is_loopback, open_server
from funrl.track.run_files import ReportError
from funrl.track.run_lock import owned_run


@contextlib.contextmanager
def served(run_dir):
    server = open_server(run_dir, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)


def get(port, path, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def tag_of(text):
    return text.split('data-tag="')[1].split('"')[0]


def write_steps(run_dir, *steps, end="\n"):
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.json").write_text(json.dumps({"experiment": "ppo", "flags": {"steps": 9}}))
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write("".join(json.dumps({"step": n, "reward/mean": n / 10, "time_s/step": 1.0}) + end for n in steps))


def test_a_page_follows_its_run(tmp_path, monkeypatch):
    monkeypatch.setattr(live_report, "LOOK_S", 0.01)
    monkeypatch.setattr(live_report, "NEWS_S", 60.0)
    run = tmp_path / "run"
    with served(run) as port:
        status, text = get(port, "/")
        assert status == 200 and "no such directory" in text and "/watch.js" in text
        write_steps(run, 1, 2)
        status, text = get(port, f"/news?since={tag_of(text)}")
        assert status == 200 and "Ended at step 2 of 9" in text and "<mark>" in text
        timer = threading.Timer(0.1, write_steps, (run, 3))
        timer.start()
        status, text = get(port, f"/news?since={tag_of(text)}")  # which waits for the line
        timer.join()
        assert status == 200 and "Ended at step 3 of 9" in text
        write_steps(run, 4, end="")  # half written, as far as anyone knows
        (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text()[:-9])
        status, text = get(port, "/")
        assert status == 200 and "Ended at step 3 of 9" in text and "not JSON" not in text
        shutil.rmtree(run)
        status, text = get(port, f"/news?since={tag_of(text)}")
        assert status == 200 and "no such directory" in text and "Ended at step 3 of 9" in text


def test_a_run_says_that_it_goes_on_until_it_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(live_report, "LOOK_S", 0.01)
    run = tmp_path / "run"
    with served(run) as port:
        with owned_run(run, "ppo", {}):
            write_steps(run, 1, 2)
            _, text = get(port, "/")
            assert "Running, step 2 of 9." in text and "Ended" not in text
        status, text = get(port, f"/news?since={tag_of(text)}")  # no file has changed
        assert status == 200 and "Ended at step 2 of 9." in text and "Running" not in text


def test_nothing_is_sent_while_nothing_happens(tmp_path, monkeypatch):
    monkeypatch.setattr(live_report, "NEWS_S", 0.05)
    write_steps(tmp_path / "run", 1)
    made = []
    monkeypatch.setattr(live_report, "render", lambda run: made.append(run) or "<main></main><body></body>")
    with served(tmp_path / "run") as port:
        _, text = get(port, "/")
        assert get(port, f"/news?since={tag_of(text)}") == (304, "")
        get(port, "/")
    assert len(made) == 1, "the page is made once for all who read it"


def test_only_this_machine_reads_and_only_the_page(tmp_path):
    write_steps(tmp_path / "run", 1)
    with served(tmp_path / "run") as port:
        assert get(port, "/", Host="evil.example")[0] == 403
        assert get(port, "/", Host=f"localhost:{port}")[0] == get(port, "/", Host=f"[::1]:{port}")[0] == 200
        assert get(port, "/../config.json")[0] == get(port, "/config.json")[0] == 404
        assert get(port, "/", method="POST")[0] == 501 and get(port, "/", method="HEAD") == (200, "")
        status, script = get(port, "/watch.js")
        assert status == 200 and "/news?since=" in script
        with pytest.raises(ReportError, match=rf"--port={port}: .*in use; give another one, or --port=0"):
            open_server(tmp_path, "127.0.0.1", port)
    assert [is_loopback(x) for x in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "host")] == [True] * 3 + [False] * 2


def test_a_line_in_the_middle_that_is_broken_is_told(tmp_path):
    write_steps(tmp_path / "run", 1)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n{"ste\n{"step": 2}\n')
    assert "metrics.jsonl, line 2: not JSON" in LivePage(tmp_path / "run").now().text


def test_the_command_tells_where_and_ends_cleanly_on_interrupt(tmp_path):
    command = [sys.executable, "-m", "funrl.experiments.cli", "watch"]
    process = subprocess.Popen(
        [*command, str(tmp_path / "run"), "--port=0"],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a shell's background has ignored
    )
    try:
        line = process.stdout.readline()
        port = int(line.split("http://127.0.0.1:")[1].split("/")[0])
        assert "is not there yet" in process.stdout.readline() and get(port, "/")[0] == 200
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(120) == 0 and process.stdout.read() == "ended\n"
    finally:
        process.kill()
        process.stdout.close()
    wrong = subprocess.run([*command, "a", "b"], capture_output=True, text=True)
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: usage: funrl watch RUN")
