#!/usr/bin/env bash
# transformers 5.24.0: a Llama or Gemma 2 config with a head_dim of its own is refused where the heads do not divide the
# hidden size, though the model would compute it; Mistral and Qwen3 configs with the same sizes are accepted.
#
# `head_dim` is an argument of LlamaConfig, and its attention projects from hidden_size to heads * head_dim and back, so the
# two sizes need not divide. The config's validator asks for it all the same, and also when a saved config.json is read, so
# a model of such sizes cannot be opened. A size that is set after construction passes, and the model computes.
#
# Seen:
#   LlamaConfig: The hidden size (10) is not a multiple of the number of attention heads (4).
#   Gemma2Config: The hidden size (10) is not a multiple of the number of attention heads (4).
#   MistralConfig: (1, 3, 16), the shape of its logits
#   Qwen3Config: (1, 3, 16)
#   LlamaConfig, hidden_size set later: (1, 3, 16) and its config.json is refused
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
cd "$folder"
"$folder/venv/bin/python" 2>"$folder/log" - <<'EOF' || { tail -20 "$folder/log"; exit 1; }
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig, Qwen3Config

sizes = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=4, intermediate_size=8, num_hidden_layers=1)
tokens = torch.tensor([[1, 2, 3]])
refusal = "The hidden size (10) is not a multiple of the number of attention heads (4)."


def shape(config):
    return tuple(AutoModelForCausalLM.from_config(config)(tokens).logits.shape)


seen = {}
for kind in (LlamaConfig, Gemma2Config, MistralConfig, Qwen3Config):
    try:
        seen[kind.__name__] = shape(kind(hidden_size=10, vocab_size=16, **sizes))
    except Exception as error:
        seen[kind.__name__] = refusal if refusal in str(error) else repr(error)
    print(f"{kind.__name__}: {seen[kind.__name__]}")
assert seen["LlamaConfig"] == seen["Gemma2Config"] == refusal
assert seen["MistralConfig"] == seen["Qwen3Config"] == (1, 3, 16)

config = LlamaConfig(hidden_size=12, vocab_size=16, **sizes)
text = config.to_json_string().replace('"hidden_size": 12', '"hidden_size": 10')
config.hidden_size = 10
assert shape(config) == (1, 3, 16)
open("config.json", "w").write(text)
try:
    AutoConfig.from_pretrained(".")
except Exception as error:
    assert refusal in str(error)
    print("LlamaConfig, hidden_size set later:", shape(config), "and its config.json is refused")
else:
    raise AssertionError("the config.json was read")
EOF
