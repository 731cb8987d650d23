"""The dialect of `/inference/v1/generate`: token ids in, token ids out, as vLLM serves it.

Reference: https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from funrl.serve.asks import (
    MOST_CHOICES,
    MOST_TOKENS,
    SAMPLING_FIELDS,
    SEEDS,
    Ask,
    BadRequest,
    Body,
    KnownFields,
    checked_ids,
)
from funrl.serve.chat_completions import FINISH, OPENAI_IGNORED
from funrl.serve.session import DecodeIds, Exchange

MOST_STOP_TOKENS = 1024
GENERATE_FIELDS = KnownFields(
    read=("token_ids", "sampling_params", "stream"),
    ignored=OPENAI_IGNORED,
    unserved={"features": "only text is served", "kv_transfer_params": "leave it out"},
)
GENERATE_PARAMETERS = KnownFields(
    read=("n", "seed", "stop", "max_tokens", "min_tokens", "logprobs", "stop_token_ids", *SAMPLING_FIELDS),
    ignored=(
        "skip_special_tokens",
        "detokenize",
        "output_kind",
        "include_stop_str_in_output",
        "extra_args",
        "routed_experts_prompt_start",  # no experts are returned
    ),
    unserved={
        "prompt_logprobs": "only sampled tokens have log-probabilities",
        "presence_penalty": "use repetition_penalty",
        "frequency_penalty": "use repetition_penalty",
        "ignore_eos": "a reply ends at the stop tokens of the model",
        "logit_bias": "leave it out",
        "structured_outputs": "replies are free text",
    },
)


def read_generate(body: Body) -> Ask:
    """The request of a body of `/inference/v1/generate`."""
    body.check(GENERATE_FIELDS)
    if body.flag("stream"):
        raise BadRequest("a stream of token ids is not served; use stream=false", "stream")
    parameters = Body(body.values.get("sampling_params") or {})
    parameters.check(GENERATE_PARAMETERS)
    stop_tokens = parameters.array("stop_token_ids", MOST_STOP_TOKENS)
    if parameters.whole("min_tokens", 0, MOST_TOKENS):
        raise BadRequest("min_tokens is not served; leave it out", "min_tokens")
    return Ask(
        tokens=checked_ids(body.values.get("token_ids"), "token_ids"),
        count=parameters.whole("n", 1, MOST_CHOICES) or 1,
        seed=parameters.whole("seed", *SEEDS),
        stop=parameters.stops(),
        stop_tokens=tuple(checked_ids(stop_tokens, "stop_token_ids")) if stop_tokens else (),
        max_tokens=parameters.whole("max_tokens", 1, MOST_TOKENS),
        sampling=parameters.sampling(),
        logprobs=parameters.whole("logprobs", 0, 1) is not None,
        token_ids=True,
        ids_as_text=True,
    )


def generate_answer(ask: Ask, exchanges: Sequence[Exchange], head: dict[str, Any], decode: DecodeIds) -> dict[str, Any]:
    """The answer of `/inference/v1/generate`."""
    choices = []
    for index, exchange in enumerate(exchanges):
        entries = [
            {"token": f"token_id:{token}", "logprob": logp, "bytes": None, "top_logprobs": []}
            for token, logp in zip(exchange.tokens, exchange.logp.tolist(), strict=True)
        ]
        finish = FINISH["stop" if exchange.finish == "calls" else exchange.finish]
        logprobs = {"content": entries} if ask.logprobs else None
        choices.append({"index": index, "token_ids": exchange.tokens, "finish_reason": finish, "logprobs": logprobs})
    versions = [exchange.version for exchange in exchanges]
    return {"request_id": head["id"], "choices": choices, "weight_version": max(versions), "prompt_logprobs": None}
