"""`funrl serve`: a model behind an endpoint, as a user starts it."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from small_servers import needs_clients

from funrl.cli.main import main
from funrl.data.tokenizer import character_tokenizer
from funrl.models import decoder_config, decoder_model
from funrl.models.huggingface import directories

TEMPLATE = "{% for m in messages %}{{ m['content'] }}>{% endfor %}"


@pytest.fixture
def model(tmp_path):
    import torch

    tokenizer = character_tokenizer("abcdefghij>?")
    tokenizer.chat_template = TEMPLATE
    sizes = {"embed": 32, "layers": 1, "heads": 4, "kv_heads": 2, "head": 8, "mlp": 32, "max_positions": 64}
    made = decoder_model(decoder_config(vocab=len(tokenizer), **sizes))
    directories.save(tmp_path, made, made.init(torch.Generator().manual_seed(0)), tokenizer)
    return tmp_path


def post(url, key, body):
    headers = {"authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.mark.slow
@pytest.mark.gloo
@needs_clients
def test_a_served_model_answers_until_it_is_told_to_end(model):
    command = [sys.executable, "-m", "funrl", "serve", str(model), "--port=0", "--mesh=tp2", "--max_new_tokens=9"]
    environment = {**os.environ, "FUNRL_API_KEY": "secret"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        url = re.search(r"http://\S+", process.stdout.readline())[0]
        assert process.stdout.readline().strip() == "key: secret"
        asked = {"model": "any", "messages": [{"role": "user", "content": "abc"}], "seed": 1}
        row, other = (post(f"{url}/chat/completions", "secret", asked) for _ in range(2))
        assert row["choices"] == other["choices"] and row["model"] == model.name
        free = [post(f"{url}/chat/completions", "secret", asked | {"seed": None}) for _ in range(4)]
        assert len({done["choices"][0]["message"]["content"] for done in free}) > 1
        cold = [post(f"{url}/chat/completions", "secret", asked | {"seed": None, "temperature": 0}) for _ in range(2)]
        assert cold[0]["choices"] == cold[1]["choices"]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            post(f"{url}/chat/completions", "wrong", asked)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()


@needs_clients
def test_a_server_of_several_replicas_and_a_taken_port_are_refused(model, capsys):
    assert main(["funrl", "serve", str(model), "--mesh=dp2", "--port=0"]) == 2
    assert "a server has one: --mesh=tpN" in capsys.readouterr().err
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        assert main(["funrl", "serve", str(model), f"--port={port}"]) == 2
    assert f"cannot listen at 127.0.0.1:{port}: " in capsys.readouterr().err
    assert main(["funrl", "serve", str(model), "--port=65536"]) == 2
    assert "--port=65536: it must be at least 0 and at most 65535" in capsys.readouterr().err
