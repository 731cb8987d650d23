"""Small decoders with every weight that a dense family has."""

from typing import Any

from funrl.models import decoder_config, decoder_model
from funrl.models.model import Model

SIZES = {"vocab": 31, "embed": 16, "layers": 2, "heads": 4, "kv_heads": 2, "head": 6, "mlp": 24}


def every_bias(**fields: Any) -> Model:
    """A decoder with norms of heads and biases; further fields are its config's."""
    biases = {"qk_norm": True, "attention_bias": True, "output_bias": True}
    return decoder_model(decoder_config(**SIZES | {"family": "qwen3"} | biases | fields))
