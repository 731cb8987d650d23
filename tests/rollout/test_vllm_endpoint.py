"""`funrl serve --engine=vllm`: programs talk to vLLM, and get what they would get from the native engine."""

import contextlib
import json
import os
import re
import signal
import urllib.request

import pytest
import torch
from forked_python import start_python
from small_engines import NO_VLLM, WIDE, weights

from funrl.data.tokenizer import character_tokenizer
from funrl.models import decoder_model
from funrl.models.huggingface import directories

needs_vllm = pytest.mark.skipif(NO_VLLM is not None, reason=str(NO_VLLM))
ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKL"  # as many as the model has tokens, less two
ASKED = {
    "model": "any",
    "messages": [{"role": "user", "content": "abc"}],
    "seed": 5,
    "n": 3,
    "logprobs": True,
    "return_token_ids": True,
}


@contextlib.contextmanager
def served(folder, engine):
    """URL of the endpoint in front of an engine."""
    words = ["-m", "funrl", "serve", str(folder), "--port=0", f"--engine={engine}", "--kv_cache_gb=0.05"]
    process = start_python([*words, "--max_new_tokens=20", "--api_key=key"], os.environ, stderr=None)
    try:
        results = []
        for line in process.stdout:  # libraries may write lines of their own
            results.append(line)
            if " is served at " in line:
                break
        assert results and " is served at " in results[-1], (process.wait(60), results)
        yield re.search(r"http://\S+", results[-1])[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"authorization": "Bearer key"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read()


def contents(stream):
    """Contents of the replies of a stream."""
    texts = {}
    for line in stream.decode().splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"].get("content", "")
    return texts


@needs_vllm
def test_the_endpoint_in_front_of_vllm_answers_as_that_of_the_native_engine(tmp_path):
    tokenizer = character_tokenizer(ALPHABET, unknown="a")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}A{% endfor %}"
    directories.save(tmp_path, decoder_model(WIDE), weights(WIDE), tokenizer)
    answers = {}
    for engine in ("native", "vllm"):
        with served(tmp_path, engine) as url:
            whole = json.loads(post(f"{url}/chat/completions", ASKED))
            stream = post(f"{url}/chat/completions", ASKED | {"stream": True})
            tokens = {"token_ids": [3, 4, 5], "sampling_params": {"n": 2, "seed": 1, "max_tokens": 4, "logprobs": 0}}
            raw = json.loads(post(url.removesuffix("/v1") + "/inference/v1/generate", tokens))
        answers[engine] = [choice for answer in (whole, raw) for choice in answer["choices"]]
        assert contents(stream) == {n: choice["message"]["content"] for n, choice in enumerate(whole["choices"])}
    for native, vllm in zip(*answers.values(), strict=True):
        assert native["token_ids"] == vllm["token_ids"] and native["finish_reason"] == vllm["finish_reason"]
        logps = [torch.tensor([x["logprob"] for x in row["logprobs"]["content"]]) for row in (native, vllm)]
        assert (logps[0] - logps[1]).abs().max() < 1e-4
