"""vLLM in a process of its own, which reads its work line by line: it changes the process that it is imported in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from instruction_set import CAPS

from funrl import trees
from funrl.models import Model
from funrl.models.huggingface import directories as hf

# vLLM chooses its own kernels by what the processor has: under the caps of --isa=avx2 it has less.
START = """
import os, torch
if os.environ.get("FUNRL_ISA") == "avx2":
    for name in "avx512", "avx512_bf16", "amx_tile", "amx_fp16":
        setattr(torch.cpu, f"_is_{name}_supported", lambda: False)

def check_kernels():
    loaded = {os.path.basename(line.split()[-1]) for line in open("/proc/self/maps") if "/vllm/_C" in line}
    assert os.environ.get("FUNRL_ISA") != "avx2" or loaded == {"_C_AVX2.abi3.so"}, loaded
"""
PEER = """
import json, sys, time
import vllm
from vllm import LLM, SamplingParams
folder, dtype, mode, clock, cache_bytes, rows = sys.argv[1:]
now = getattr(time, clock)
llm = LLM(folder, dtype=dtype, enforce_eager=mode == "eager", kv_cache_memory_bytes=int(cache_bytes),
          skip_tokenizer_init=True, enable_prefix_caching=False, max_num_seqs=int(rows), disable_log_stats=True)
check_kernels()
print("ready", vllm.__version__, flush=True)
for line in sys.stdin:
    prompts, new, seed = json.loads(line)
    how = [SamplingParams(max_tokens=n, ignore_eos=True, seed=seed + i, logprobs=0, detokenize=False)
           for i, n in enumerate(new)]
    begin = now()
    done = llm.generate([{"prompt_token_ids": p} for p in prompts], how, use_tqdm=False)
    seconds = now() - begin
    assert [len(d.outputs[0].token_ids) for d in done] == new
    print("took", seconds, flush=True)
"""
ENGINE_PEER = """
import json, sys
sys.path.insert(0, "benchmarks")
from generate import engine_turn
from funrl.mesh.mesh import SINGLE
from funrl.models.huggingface import directories as hf
from funrl.rollout.vllm.engine import vllm_engine
from funrl.rollout.vllm.contract import VLLMOptions
folder, name, _, _, cache_bytes, rows = sys.argv[1:]
dtype = getattr(torch, name)
model, params = hf.load(folder, dtype)
turn = engine_turn(vllm_engine(model, SINGLE, dtype, VLLMOptions(int(rows), int(cache_bytes))), params)
check_kernels()
print("ready", flush=True)
for line in sys.stdin:
    print("took", turn(*json.loads(line)), flush=True)
"""
DEVICE_VARIABLES = ("CUDA", "HIP", "ROCR", "NVIDIA", "LD_LIBRARY_PATH")  # prefixes of what a GPU's libraries read


class PeerOptions(NamedTuple):
    """Options of vLLM.

    Attributes:
      python: interpreter of an environment that has it.
      mode: "eager" or "compiled", vLLM by itself; "engine", funrl's engine over it.
      clock: function of `time` that seconds are of.
      cache_bytes: bytes of keys and values.
      rows: that are decoded together.
    """

    python: str = sys.executable
    mode: str = "compiled"
    clock: str = "perf_counter"
    cache_bytes: int = 1 << 30
    rows: int = 256


class Peer:
    """vLLM with the weights of a model.

    Attributes:
      version: of vLLM by itself, once it runs.
      flags: that it is given, for people.
    """

    version = ""

    def __init__(self, model: Model, params: trees.Tree, dtype: str, options: PeerOptions):
        self.flags = f"{options.mode}, {dtype}, max_num_seqs={options.rows}, enable_prefix_caching=False"
        self.folder = tempfile.TemporaryDirectory()
        hf.save(self.folder.name, model, params)
        threads = str(torch.get_num_threads())
        device = {name: value for name, value in os.environ.items() if name.startswith(DEVICE_VARIABLES)}
        caps = {name: os.environ[name] for name in CAPS if name in os.environ}
        environment = (
            device
            | caps
            | {
                "PATH": os.environ["PATH"],
                "HOME": os.environ.get("HOME", "/"),
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "OMP_NUM_THREADS": threads,
                "VLLM_LOGGING_LEVEL": "ERROR",
                "HF_HUB_OFFLINE": "1",
                "PYTHONPATH": str(Path(__file__).parents[1]),
            }
        )
        program = ENGINE_PEER if options.mode == "engine" else PEER
        numbers = str(options.cache_bytes), str(options.rows)
        self.process = subprocess.Popen(
            [options.python, "-c", START + program, self.folder.name, dtype, options.mode, options.clock, *numbers],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __enter__(self) -> Peer:
        self.version = self._read("ready").removeprefix("ready").strip()
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.folder.cleanup()

    def turn(self, prompts: Sequence[Sequence[int]], new: Sequence[int], seed: int) -> float:
        """Seconds of completing the prompts with so many new tokens each."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([prompts, new, 1000 * seed]) + "\n")
        self.process.stdin.flush()
        return float(self._read("took").split()[1])

    def _read(self, word: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return line
        raise RuntimeError(f"vLLM ended with exit code {self.process.wait()}")
