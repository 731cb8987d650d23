#!/usr/bin/env bash
# trl 1.16.0 with gpt-oss's chat template: `assistant_only_loss` trains calls without the thoughts before them.
#
# The template leaves out what the assistant thought before a call once a final answer follows, and TRL's
# training template keeps that. A record of a question, thoughts with a call, a result and an answer, which is the usual
# form of data for agents, trains the call directly after the question: the thoughts are in no trained token. The same
# record cut behind the call trains them. Earlier answers are trained to end with `<|end|>`, which does not stop gpt-oss
# (`<|return|>` does), and `<|start|>assistant`, which the prompt of generation has already, is trained in every turn.
# Nothing is logged about any of it.
#
# Seen:
#   whole: ['<|start|>assistant to=functions.mul<|channel|>commentary json<|message|>{"a": 2}<|call|>', '<|start|>assistant<|channel|>final<|message|>It is 6.<|return|>']
#   cut: ['<|start|>assistant<|channel|>analysis<|message|>multiply<|end|><|start|>assistant to=functions.mul<|channel|>commentary json<|message|>{"a": 2}<|call|>']
#   two answers: ['<|start|>assistant<|channel|>final<|message|>yo<|end|>', '<|start|>assistant<|channel|>final<|message|>ok<|return|>']
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 trl==1.16.0 transformers==5.24.0 tokenizers==0.23.3 datasets==5.2.0
cd "$folder"
"$folder/venv/bin/python" 2>"$folder/log" - <<'EOF' || { tail -20 "$folder/log"; exit 1; }
import pathlib, trl
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def tokenizer_of(name, end, marks):
    """A tokenizer of bytes with one of TRL's copies of published chat templates."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in [*marks, end, "<pad>"]])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, pad_token="<pad>")
    tokenizer.chat_template = (pathlib.Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    return tokenizer


def model_of(tokenizer):
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes))


def trained(tokenizer, record, **options):
    """The stretches of the record that TRL's SFTTrainer trains."""
    args = trl.SFTConfig("out", max_length=None, use_cpu=True, bf16=False, report_to="none", **options)
    data = Dataset.from_list([record])
    row = trl.SFTTrainer(model_of(tokenizer), args, train_dataset=data, processing_class=tokenizer).train_dataset[0]
    parts, before = [], False
    for token, label in zip(row["input_ids"], row["labels"]):
        if label != -100:
            parts = [*parts[:-1], [*parts[-1], token]] if before else [*parts, [token]]
        before = label != -100
    return [tokenizer.decode(part) for part in parts]


marks = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|endoftext|>"]
chat = tokenizer_of("gptoss", "<|return|>", marks)
call = {"type": "function", "function": {"name": "mul", "arguments": {"a": 2}}}
agent = [
    {"role": "user", "content": "2*3?"},
    {"role": "assistant", "content": "", "thinking": "multiply", "tool_calls": [call]},
    {"role": "tool", "content": "6"},
    {"role": "assistant", "content": "It is 6."},
]
talk = [{"role": role, "content": text} for role, text in
        [("user", "hi"), ("assistant", "yo"), ("user", "more"), ("assistant", "ok")]]
whole, cut, two = (trained(chat, {"messages": x}, assistant_only_loss=True) for x in (agent, agent[:2], talk))
print("whole:", whole, "\ncut:", cut, "\ntwo answers:", two)
assert "multiply" not in "".join(whole) and "multiply" in cut[0] and len(whole) == 2
assert two[0].endswith("yo<|end|>") and two[1].endswith("ok<|return|>")
assert all(text.startswith("<|start|>assistant") for text in whole + cut + two)
EOF
