#!/usr/bin/env bash
# torch.distributed's all_reduce with ReduceOp.MAX or MIN over gloo keeps a NaN of rank 0 and loses one of rank 1.
#
# Version: torch 2.13.0 (CPU build), two local processes, float32, float64 and bfloat16.
# Behaviour: the result is NaN or a number by the order of the ranks, while torch.maximum, torch.amax and every other
# elementwise maximum of torch give NaN if either number is one. So a metric that is NaN in one process may be finite
# over two, and a check for NaN after the reduction misses it.
# Seen (x is [nan, 1] on rank 0 and [1, nan] on rank 1):
#     MAX float32 [nan, 1.0]
#     MIN float32 [nan, 1.0]
#     ... and the same for float64 and bfloat16; torch.maximum of the two gives [nan, nan].
# Exits with 1 if the behaviour has changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0
cat > "$work/reduce.py" <<'PY'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

NAN = float("nan")
OPS = {"MAX": (dist.ReduceOp.MAX, torch.maximum), "MIN": (dist.ReduceOp.MIN, torch.minimum)}


def program(rank, rendezvous):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    kept = []
    for name, (op, elementwise) in OPS.items():
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            both = torch.tensor([[NAN, 1.0], [1.0, NAN]], dtype=dtype)
            x = both[rank].clone()
            dist.all_reduce(x, op)
            assert elementwise(*both).isnan().all()
            kept.append(x.isnan().tolist())
            if rank == 0:
                print(name, str(dtype).removeprefix("torch."), x.tolist(), flush=True)
    dist.destroy_process_group()
    if kept != [[True, False]] * 6:
        sys.exit("the behaviour has changed: a NaN is no longer kept on rank 0 and lost on rank 1")


if __name__ == "__main__":
    mp.spawn(program, (sys.argv[1],), 2)
PY
"$work/venv/bin/python" "$work/reduce.py" "$work/rendezvous"
