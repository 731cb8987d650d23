#!/usr/bin/env bash
# A new user's ten jobs, one after the other, as they would be typed; it ends at the first that does not do its work.
#
#   bash tests/first_day.sh [FOLDER]
#
# Everything is made in FOLDER (by default a temporary one), small enough for a CPU. FUNRL_DATA names a folder with
# stories260k and gsm8k; without it the part that needs them is skipped. PYTHON is the interpreter.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
data=${FUNRL_DATA:-$root/../shared/data}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
run_python() { "${PYTHON:-python3}" "$@"; }
funrl() { run_python -m funrl.cli.main "$@"; }
job() { printf '\n== %s (after %s s)\n' "$*" "$SECONDS"; }
cd "${1:-$(mktemp -d)}"

# check RUN EXPRESSION: of m, the metrics of every step, and config, the run's flags
check() {
  run_python - "$@" <<'CODE'
import json, sys
run, expression = sys.argv[1:]
m = [json.loads(line) for line in open(f"{run}/metrics.jsonl")]
config = json.load(open(f"{run}/config.json"))["flags"]
if not eval(expression):
    sys.exit(f"FAILED: {run}: {expression}; the last step has {m[-1]}")
CODE
}

# expect TEXT FILE: the file has this text
expect() {
  grep -qF -- "$1" "$2" || { printf 'FAILED: %s is not in %s:\n' "$1" "$2" >&2; cat "$2" >&2; exit 1; }
}

job "0. a small model and data of the usual shapes"
cat > make.py <<'CODE'
import json
import string
import pyarrow
import pyarrow.parquet
import torch
from funrl.data.tokenizer import character_tokenizer
from funrl.models import decoder_config, decoder_model
from funrl.models.huggingface import directories as hf

tokenizer = character_tokenizer(string.printable)
config = decoder_config(
    vocab=len(tokenizer), embed=32, layers=2, heads=4, kv_heads=2, head=8, mlp=64, max_positions=256, eos=(1,), pad=0
)
model = decoder_model(config)
hf.save("MODEL", model, model.init(torch.Generator().manual_seed(0)), tokenizer)

sums = [{"problem": f"{a} + {b} = ", "solution": str(a + b)} for a in range(8) for b in range(8)]
pyarrow.parquet.write_table(pyarrow.Table.from_pylist(sums), "sums.parquet")
solved = [{"question": f"What is {a} + {b}?", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"} for a in range(8) for b in range(8)]
pairs = [{"prompt": one["problem"], "chosen": one["solution"], "rejected": one["solution"] + "0"} for one in sums]
for name, records in {"gsm8k.jsonl": solved, "pairs.jsonl": pairs}.items():
    with open(name, "w") as file:
        file.writelines(json.dumps(one) + "\n" for one in records)
CODE
cat > rewards.py <<'CODE'
import asyncio


def digits(completions, solution, **columns):
    """As TRL calls it: lists of completions and of a column."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


async def asked(prompt, completion, **fields):
    """A request to another machine, as it were."""
    await asyncio.sleep(0.02)
    return float(any(c.isdigit() for c in completion))
CODE
run_python make.py
small="--steps=1 --batch_prompts=4 --samples_per_prompt=4 --max_new_tokens=6 --eval_prompts=4"

job "1. doctor: would this run?"
columns="--fields=prompt:problem"
funrl doctor grpo --model=MODEL --prompts=sums.parquet $columns --reward=rewards.py:digits $small | tee doctor.txt
expect "would run" doctor.txt

job "2. prompts: parquet with columns of its own, and a raw file of GSM8K"
funrl grpo --model=MODEL --prompts=sums.parquet $columns --reward=rewards.py:digits ${small/--steps=1/--steps=2} --lr=1e-3 --run_dir=PARQUET
check PARQUET 'len(m) == 2 and m[-1]["actor/grad_norm"] > 0'
funrl grpo --model=MODEL --prompts=gsm8k.jsonl --reward=gsm8k $small --run_dir=GSM8K
check GSM8K 'len(m) == 1 and "eval/accuracy" in m[-1]'
if [ -d "$data/stories260k" ] && [ -d "$data/gsm8k" ]; then
  head -n 500 "$data/gsm8k/train.jsonl" > train.jsonl
  head -n 100 "$data/gsm8k/test.jsonl" > test.jsonl
  funrl grpo --model="$data/stories260k" --prompts=train.jsonl --eval_data=test.jsonl \
    --reward=gsm8k --long_prompts=drop --max_prompt_tokens=200 $small --run_dir=REAL
  check REAL 'len(m) == 1 and m[-1]["rollout/logprob_gap_max"] < 1e-4'
else
  echo "skipped: GSM8K itself on a real model; FUNRL_DATA names no folder with stories260k and gsm8k"
fi

job "3. rewards: batched as TRL's, awaited, and both with weights"
funrl grpo --model=MODEL --prompts=sums.parquet $columns --reward=rewards.py:digits@0.5,rewards.py:asked $small --run_dir=REWARDS
check REWARDS '{"reward/digits/mean", "reward/asked/mean"} <= set(m[-1]) and m[-1]["time_s/reward"] < 3'

job "4. LoRA, and its adapter"
funrl grpo --model=MODEL --prompts=sums.parquet $columns --reward=rewards.py:digits $small --lora_rank=4 --run_dir=LORA
check LORA 'len(m) == 1 and m[-1]["actor/grad_norm"] > 0'
ls LORA/adapter/adapter_config.json LORA/adapter/adapter_model.safetensors LORA/model/config.json

job "5. a reward model, and PPO by it"
funrl reward_model --model=MODEL --data=pairs.jsonl --steps=1 --batch_prompts=8 --run_dir=RATER
funrl ppo --model=MODEL --prompts=sums.parquet $columns --reward_model=RATER $small --run_dir=RATED
check RATED 'len(m) == 1 and "critic/vf_loss" in m[-1] and m[-1]["time_s/score_reward_model"] > 0'

job "6. evaluation of a run, and of a directory on data of its own"
funrl evaluate PARQUET --samples=4 --temperature=1.0 --output=OF_RUN
funrl evaluate PARQUET/model --data=gsm8k.jsonl --reward=gsm8k --limit=4 --max_new_tokens=6 --output=OF_DATA | tee evaluated.txt
expect "accuracy" evaluated.txt
funrl generate PARQUET/model "3 + 4 = " --max_new_tokens=6
ls OF_RUN/evaluation.json OF_RUN/eval_samples.jsonl OF_DATA/evaluation.json

job "7. the same run again, by its config.json"
funrl --config=PARQUET/config.json --run_dir=AGAIN
run_python - <<'CODE'
import json
first, again = ([json.loads(line) for line in open(f"{run}/metrics.jsonl")] for run in ("PARQUET", "AGAIN"))
own = ("time_s/", "perf/tokens_per_s", "memory/")
for one, other in zip(first, again, strict=True):
    different = [name for name in one if not name.startswith(own) and one[name] != other[name]]
    assert not different, f"FAILED: other numbers: {different}"
CODE

job "8. TRL's names of flags"
status=0
funrl grpo --model_name_or_path=MODEL --prompts=gsm8k.jsonl --reward=gsm8k --learning_rate=1e-4 --num_generations=4 \
  --per_device_train_batch_size=8 --gradient_accumulation_steps=2 --max_completion_length=6 --beta=0.04 --max_steps=1 \
  --logging_steps=1 --eval_prompts=4 --output_dir=TRL 2> trl.txt || status=$?
[ "$status" = 2 ]
expect "--num_generations=4 is TRL's name: write --samples_per_prompt=4" trl.txt
# shellcheck disable=SC2046  # the flags that the message gives are words
funrl grpo --prompts=gsm8k.jsonl --reward=gsm8k --eval_prompts=4 $(sed -n 's/^together: //p' trl.txt)
check TRL 'config["lr"] == 1e-4 and config["batch_prompts"] == 4 and config["kl_coef"] == 0.04 and len(m) == 1'

job "9. two runs compared"
funrl replay PARQUET LORA > compared.txt || [ "$?" = 1 ]
funrl report PARQUET
expect "lora_rank" compared.txt

job "10. from Python"
cat > own.py <<'CODE'
import funrl
from funrl import algos


def mine(clip: float = 0.2):
    center = algos.stateless(lambda score, batch: score - score.mean())
    surrogate = algos.reduce(algos.clipped_surrogate(clip, clip), algos.token_mean())
    return algos.Algorithm(algos.chain(center, algos.to_tokens()), {"policy": surrogate})


def short(prompt, completion, **fields):
    return -float(len(completion))


seen = []
run = funrl.train(
    mine(),
    model="MODEL",
    prompts=[{"prompt": f"{a} + 1 = "} for a in range(16)],
    reward=short,
    steps=1,
    batch_prompts=4,
    max_new_tokens=6,
    on_step=lambda step, metrics: seen.append(step),
)
assert seen == [1] and len(run.metrics) == 1, seen
assert run.metrics[-1]["reward/mean"] <= 0
assert len(run.model.generate(["2 + 2 = "], max_new_tokens=4)) == 1
found = funrl.evaluate(run.run_dir + "/model", data=[{"prompt": "2 + 2 = "}], reward=short, max_new_tokens=4)
print(found)
CODE
run_python own.py
printf '\nall ten jobs are done, after %s s\n' "$SECONDS"
