"""generation_config.json of a Hugging Face directory: further tokens that end a text, and how to sample.

A `ModelConfig` keeps the file as it is, so that it is saved with the model; what is read of it is here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from funrl.models.errors import ModelError
from funrl.models.flat import with_fields
from funrl.models.model import ModelConfig

GENERATION = "generation_config.json"
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def with_generation_config(config: ModelConfig, raw: Mapping[str, Any]) -> ModelConfig:
    """The config with a parsed generation_config.json, and with the tokens that it says end a text.

    Token ids that are not in the vocabulary are left out: they cannot be drawn.

    Raises:
      ModelError: a field that is read has a value of the wrong type.
    """
    eos = raw.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ModelError(f"eos_token_id is {eos!r}, it must be a token id or a list of them")
    for name in SAMPLING:
        value = raw.get(name)
        good = int if name == "top_k" else (int, float)
        if value is not None and (isinstance(value, bool) or not isinstance(value, good)):
            raise ModelError(f"{name} is {value!r}, it must be a {'whole ' * (good is int)}number")
    further = [
        token for token in dict.fromkeys(ids) if token not in config.special_tokens.eos and 0 <= token < config.vocab
    ]
    return with_fields(config, eos=(*config.special_tokens.eos, *further), generation=json.dumps(raw))


def sampling_defaults(config: ModelConfig) -> dict[str, float]:
    """Sampling values of `SAMPLING` in the model's generation_config.json; none without a file.

    Temperature is 0, greedy, unless do_sample is true.

    Warning: that is transformers' reading of do_sample; vLLM ignores it, and samples by the file's temperature.
      transformers takes top_k=50 where the file has none; here and in vLLM it is then all tokens.
    """
    if not config.source.generation:
        return {}
    raw = json.loads(config.source.generation)
    defaults = {name: raw[name] for name in SAMPLING if raw.get(name) is not None}
    return defaults | {"temperature": defaults.get("temperature", 1.0) if raw.get("do_sample") else 0.0}
