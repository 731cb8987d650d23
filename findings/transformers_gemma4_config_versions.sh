#!/usr/bin/env bash
# A Gemma 4 config.json written by transformers 5.24 has other head sizes when 5.13 reads it, without a word.
#
# Version: transformers 5.13.0 and 5.24.0.
# Behaviour: 5.13 keeps the sizes of layers with full attention in `global_head_dim` and `num_global_key_value_heads`. 5.24
# takes these as arguments, moves them into `per_layer_config` and writes only that. 5.13 does not know this field, keeps
# it as an unknown attribute, and takes its own defaults: 512 and the model's number of key-value heads. The other way
# round, from 5.13 to 5.24, the sizes stay.
# Seen (a text model of head_dim 16, global_head_dim 32, num_global_key_value_heads 1):
#     written by 5.24.0: per_layer_config {'5': {'head_dim': 32, 'num_key_value_heads': 1}}, global_head_dim absent
#     read by 5.13.0: the same per_layer_config, global_head_dim 512, num_global_key_value_heads None
#     written by 5.13.0: per_layer_config absent, global_head_dim 32
#     read by 5.24.0: per_layer_config {'5': {'head_dim': 32, 'num_key_value_heads': 1}}
# Exits with 1 if the behaviour has changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/5.13.0"
python3 -m venv "$work/5.24.0"
"$work/5.13.0/bin/pip" install --quiet transformers==5.13.0
"$work/5.24.0/bin/pip" install --quiet transformers==5.24.0
cat > "$work/config.py" <<'PY'
import json
import sys

import transformers
from transformers import Gemma4TextConfig

action, folder = sys.argv[1:]
sizes = {"head_dim": 16, "num_key_value_heads": 2, "attention_k_eq_v": True, "num_hidden_layers": 6}
if action == "write":
    Gemma4TextConfig(**sizes, global_head_dim=32, num_global_key_value_heads=1).save_pretrained(folder)
    with open(f"{folder}/config.json") as file:
        values = json.load(file)
else:
    values = Gemma4TextConfig.from_pretrained(folder).to_dict()
names = ("per_layer_config", "global_head_dim", "num_global_key_value_heads")
shown = ", ".join(f"{name} {values[name]}" if name in values else f"{name} absent" for name in names)
print(f"{'written' if action == 'write' else 'read'} by {transformers.__version__}: {shown}")
PY
{
  "$work/5.24.0/bin/python" "$work/config.py" write "$work/new"
  "$work/5.13.0/bin/python" "$work/config.py" read "$work/new"
  "$work/5.13.0/bin/python" "$work/config.py" write "$work/old"
  "$work/5.24.0/bin/python" "$work/config.py" read "$work/old"
} 2>/dev/null | tee "$work/seen"
grep -q "written by 5.24.0: per_layer_config {'5': {'head_dim': 32.*global_head_dim absent" "$work/seen"
grep -q "read by 5.13.0: .*, global_head_dim 512, num_global_key_value_heads None" "$work/seen"
grep -q "written by 5.13.0: per_layer_config absent, global_head_dim 32" "$work/seen"
grep -q "read by 5.24.0: .*'head_dim': 32" "$work/seen"
