#!/usr/bin/env bash
# transformers 5.24.0: LlamaConfig loads torch.distributed.tensor and sympy where torch is installed; the configs of Mistral,
# Qwen3 and Gemma 2, with the same fields, and a tokenizer do not.
#
# A config is a record of sizes, and its classes are loaded lazily. The module of LlamaConfig bounds a field by a validator of
# transformers.utils.type_validators. That one imports transformers.activations, which imports the kernels of the hub, the
# loading of weights and, for its sharding, torch.distributed.tensor with sympy. So a program that only reads the config.json
# of a Llama pays for all of it at its start: with torch loaded before, 0.8 of 2.7 CPU-seconds (AMD EPYC).
#
# Seen:
#   LlamaConfig: sympy, torch.distributed.tensor, transformers.core_model_loading
#   MistralConfig, Qwen3Config, Gemma2Config, PreTrainedTokenizerFast: none of them
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
cd "$folder"
for name in LlamaConfig MistralConfig Qwen3Config Gemma2Config PreTrainedTokenizerFast; do
  venv/bin/python 2>log - "$name" <<'EOF' || { tail -20 log; exit 1; }
import sys

import torch
import transformers

heavy = ("sympy", "torch.distributed.tensor", "transformers.core_model_loading")
assert not any(name in sys.modules for name in heavy)
getattr(transformers, sys.argv[1])
found = [name for name in heavy if name in sys.modules]
print(f"{sys.argv[1]}: {', '.join(found) or 'none of them'}")
assert len(found) == (3 if sys.argv[1] == "LlamaConfig" else 0)
EOF
done
