#!/usr/bin/env bash
# transformers' apply_chat_template writes a date or a decimal of a call's arguments as the name of its type.
#
# Versions: transformers 5.24.0, jinja2 3.1.6, tokenizers 0.23.1.
# Behaviour: a value that JSON has not, such as a datetime or a Decimal, becomes the text "<datetime>" or "<Decimal>" in the
# rendered chat, without an error or a warning; json.dumps, which `tojson` stands for, raises TypeError. Columns of parquet
# and of data sets give such values for timestamps and decimals, so a run trains on the names of types.
# Seen:
#     {"at": "<datetime>", "price": "<Decimal>"}
# Exits with 1 if the behaviour has changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet transformers==5.24.0 jinja2==3.1.6 tokenizers==0.23.1
cat > "$work/render.py" <<'PY'
import datetime
import decimal
import sys

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
tokenizer.chat_template = "{% for m in messages %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}"
arguments = {"at": datetime.datetime(2024, 5, 1, 12), "price": decimal.Decimal("1.5")}
call = {"type": "function", "function": {"name": "book", "arguments": arguments}}
text = tokenizer.apply_chat_template([{"role": "assistant", "content": "", "tool_calls": [call]}], tokenize=False)
print(text)
sys.exit(text != '{"at": "<datetime>", "price": "<Decimal>"}')
PY
"$work/venv/bin/python" "$work/render.py" 2>/dev/null
