"""The dry run beside published figures of other projects: seconds of a step and memory of a device, row by row.

    OMP_NUM_THREADS=1 python benchmarks/published.py [--rows=REGEX] [--write]

`published.json` has the rows with their sources. A row becomes the flags of a run of funrl, and the dry run's update
stands beside the published step. A row is fitted if the first byte of the SHA-256 of its name is even. Three constants
are fitted on these rows: the share of the peak that products reach in whole steps (`MEASURED_SHARES`), the seconds in
which the devices of prime-rl's RL trainer wait for its host, and those of an iteration of NeMo RL's engine beyond
funrl's. The other rows test them. --write puts the table into README.md.

A peer's program differs from funrl's where its source says so: `PROGRAMS` has its kernels, whether layers are compiled,
and what it moves and holds besides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import re
import statistics
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from funrl.algos.recipes import recipe
from funrl.cost.dry_run import estimate, plain_job
from funrl.cost.schedules import Workload, lengths_of, rule_of, shared_split, simulate_rule, traced_ranks
from funrl.cost.tracing.costs import UPDATES, Costs, Traffic
from funrl.cost.tracing.estimate import Estimate
from funrl.cost.tracing.hardware import FLASH_ATTENTION_3, HARDWARE, MEASURED_SHARES, Hardware
from funrl.cost.verdict import Errors, communication, hidden, phase_seconds
from funrl.mesh.text import ROW_AXES, devices, parse
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.settings.settings import Settings, settings_of, with_flags

DATA = Path(__file__).parent / "published.json"
GIB = 2.0**30


class Row(NamedTuple):
    """A published figure.

    Attributes:
      name: of the row, unique.
      source: key of the table of sources.
      model: key of the table of configurations.
      hardware: name of the devices, of `HARDWARE` or of the file's table.
      gpus: number of devices.
      tokens: of a packed row; where completions are sampled, of the longest one.
      mean_tokens: of a row with its completion, where they are sampled.
      rows: of a device's micro-batch.
      micro_batches: of a step on each device, or group of devices that share rows.
      mesh: of the devices.
      remat: as --remat.
      program: key of `PROGRAMS`.
      flags: further flags.
      seconds: of a step; None: not published.
      gib: of a device; None: not published.
      reason: why funrl cannot express it; "": it can.
    """

    name: str
    source: str
    model: str
    hardware: str
    gpus: int
    tokens: int = 0
    mean_tokens: int | None = None
    rows: int = 1
    micro_batches: int = 1
    mesh: str = "dp1"
    remat: str = "full"
    program: str = "default"
    flags: Mapping[str, Any] = types.MappingProxyType({})
    seconds: float | None = None
    gib: float | None = None
    reason: str = ""

    @property
    def fitted(self) -> bool:
        """True if constants may be fitted on it."""
        return hashlib.sha256(self.name.encode()).digest()[0] % 2 == 0


def read_rows() -> list[Row]:
    """All rows of the file."""
    return [Row(**fields) for fields in json.loads(DATA.read_text())["rows"]]


class Program(NamedTuple):
    """Differences of a peer's program from funrl's.

    Attributes:
      attention: shares of the peak that its kernel reaches; {}: torch's FlashAttention-2, as in funrl.
      compiled: whether layers are compiled.
      logit_bytes: bytes a logit where it keeps [tokens, vocabulary] whole: 16-bit logits and their gradient, and
        float32 copies, log-probabilities and gradient; 0: it takes blocks, as funrl.
      logit_traffic: bytes a logit that it moves beyond funrl.
      adapter_traffic: bytes of a result of an adapted product that it moves beyond funrl.
      adapters: their number for each product; with experts, each of them has its own.
      every_other: whether --remat=selective recomputes every second product too.
      frozen_bytes: bytes of a frozen weight; funrl has 2.
      keeps_table: whether tied embeddings stay whole throughout the backward pass, with their gradient.
      routed_bytes: bytes of a number of a row that goes to an expert, which it holds in the backward pass beyond funrl.
      routed_traffic: bytes of such a number that it moves in a step beyond funrl.
      dispatched: share of funrl's bytes between experts' ranks that it sends while nothing else runs; 0: as funrl.
      host_s: seconds of a step in which devices wait for the host.
    """

    attention: Mapping[str, float] = types.MappingProxyType({})
    compiled: bool = True
    logit_bytes: int = 0
    logit_traffic: int = 0
    adapter_traffic: int = 0
    adapters: int = 1
    every_other: bool = False
    frozen_bytes: int = 2
    keeps_table: bool = False
    routed_bytes: int = 0
    routed_traffic: int = 0
    dispatched: float = 0.0
    host_s: float = 0.0


# What prime-rl moves beyond funrl, counted in its code of January 2026. Log-probabilities in float32 go by blocks of
# 8,192 columns, one operator after the other (lm_head.py): 116 bytes a logit forward and backward, where funrl moves
# about 36. Its benchmarks compile layers, but an adapted product (multi_linear.py) ends a graph at its assertion and at
# `repeat_interleave`, as torch 2.13 shows: one kernel scales the adapter's 16-bit result and adds it, 4 bytes beyond
# funrl in each of two forward passes, one scales its gradient, 4 bytes, and the gate, a third of the results, is two
# kernels instead of one, 14 bytes.
LOGIT_TRAFFIC = 80
ADAPTER_TRAFFIC = 16
ADAPTERS = 4  # of its benchmark's runs
# In supervised runs it holds float32 logits (its `out` lives on), log-probabilities and two gradients, 16 bytes a
# logit. The 16-bit logits, freed before, leave 2 bytes of reserved memory that none of these fits into.
# Its layers of experts (moe.py of January 2026) weight each routed row in float32 by operators one by one. In the
# backward pass the row, its gradient and two products of these are held, 16 bytes a number with the row's gradient of
# 16 bits where funrl holds 4. Passes over them move 20 bytes in each of two forward passes and 38 backward, where funrl
# moves about 18.
ROUTED_BYTES = 12
ROUTED_TRAFFIC = 60
HOST_S = 0.75  # of a step of its RL trainer, fitted
PRIME_SFT = Program(logit_bytes=18, keeps_table=True, routed_bytes=ROUTED_BYTES, routed_traffic=ROUTED_TRAFFIC)
PRIME_RL = PRIME_SFT._replace(
    logit_bytes=0,
    logit_traffic=LOGIT_TRAFFIC,
    adapter_traffic=ADAPTER_TRAFFIC,
    adapters=ADAPTERS,
    frozen_bytes=4,
    host_s=HOST_S,
)
# Its attention is of FlashAttention-3's kind; grouped products of thousands of rows an expert are taken as products.
TRANSFORMER_ENGINE = {
    **FLASH_ATTENTION_3,
    "grouped": MEASURED_SHARES.product,
    "grouped_backward": MEASURED_SHARES.product,
}
# AutoModel's layers of experts: one kernel to permute rows and one back, 20 bytes a number in three passes, where funrl
# moves 91 by the dry run. DeepEP sends a token once to each rank that has some of its 8 of 128 experts, which its gate
# draws evenly: to 5.3 of 8 ranks, where funrl sends 8 rows and room for a quarter more; what goes back is not computed
# again, and nothing overlaps.
DEEPEP = Program(TRANSFORMER_ENGINE, logit_bytes=16, routed_traffic=20 - 91, dispatched=5.3 / 8 / 1.25 * 5 / 6)
TORCHTITAN = Program(logit_bytes=16, every_other=True)

PROGRAMS = {
    "default": Program(),
    "prime-rl": PRIME_RL._replace(attention=FLASH_ATTENTION_3),
    "prime-rl, FA2": PRIME_RL,
    "prime-rl, SFT": PRIME_SFT._replace(attention=FLASH_ATTENTION_3),
    "prime-rl, SFT, FA2": PRIME_SFT,
    "torchtitan": TORCHTITAN,
    "torchtitan, eager": TORCHTITAN._replace(compiled=False),
    "Transformer Engine": Program(TRANSFORMER_ENGINE, logit_bytes=16),
    "Transformer Engine, DeepEP": DEEPEP,
}


class Predicted(NamedTuple):
    """The dry run's numbers for a row: seconds of a step and memory of a device, 0 if that is not estimated."""

    seconds: float
    gib: float = 0.0


def hardware_for(row: Row) -> Hardware:
    """The row's devices with the shares that the peer's kernels reach."""
    own = json.loads(DATA.read_text())["hardware"].get(row.hardware)
    hardware = HARDWARE[row.hardware] if own is None else HARDWARE[own.pop("like")]._replace(**own)
    program = PROGRAMS[row.program]
    shares = hardware.efficiency._replace(**program.attention)
    return hardware._replace(efficiency=shares if program.compiled else shares._replace(fused=1.0))


@contextlib.contextmanager
def config_of(row: Row) -> Iterator[str]:
    """The path of the model's config.json."""
    config = json.loads(DATA.read_text())["models"][row.model]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps({"rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 1e6} | config))
        yield str(path)


def settings_for(row: Row, config: str) -> Settings:
    """The flags of funrl's run: supervised, since a peer's step is an update on whole rows."""
    sizes = parse(row.mesh)
    groups = devices(sizes, ROW_AXES)
    return settings_of(
        model=config,
        mesh=row.mesh,
        dtype="bfloat16",
        remat=row.remat,
        batch_prompts=row.rows * row.micro_batches * groups,
        token_budget=row.rows * row.tokens // sizes["sequence"],
        dry_run=True,
        text_tokens=row.tokens,
        **row.flags,
    )


def predict(row: Row) -> Predicted:
    """The dry run of a row that funrl can express."""
    if row.mean_tokens is not None:
        return Predicted(sampled_seconds(row))
    updates, found = update_costs(row)
    hardware = hardware_for(row)
    seconds = sum(phase_seconds(found, costs, hardware) for costs in updates) + further_seconds(row, found, hardware)
    seconds += sum(dispatch_seconds(row, found, costs, hardware) for costs in updates)
    return Predicted(seconds, max(peak_bytes(row, found, costs) for costs in updates) / GIB)


def dispatch_seconds(row: Row, found: Estimate, costs: Costs, hardware: Hardware) -> float:
    """Seconds in which a peer's layers wait for rows to and from the ranks of their experts, beyond funrl."""
    share = PROGRAMS[row.program].dispatched
    sent = {key: traffic for key, traffic in costs.traffic.items() if key[0].startswith("all_to_all")}
    if not share or not sent:
        return 0.0
    rows = Costs(traffic={key: Traffic(0.0, share * traffic.nbytes) for key, traffic in sent.items()})
    others = {key: traffic for key, traffic in costs.traffic.items() if key not in sent}
    early = {key: traffic for key, traffic in costs.early.items() if key not in sent}
    left = dataclasses.replace(costs, traffic=others, early=early)
    now = communication(found, costs, hardware) - hidden(found, costs, hardware)
    return (
        communication(found, rows, hardware)
        + communication(found, left, hardware)
        - hidden(found, left, hardware)
        - now
    )


def further_seconds(row: Row, found: Estimate, hardware: Hardware) -> float:
    """Seconds of a step for what the peer's program does beyond funrl's."""
    program = PROGRAMS[row.program]
    sizes = layer_sizes(row)
    tokens = row.rows * row.micro_batches * row.tokens
    moved = float(program.logit_traffic * tokens * found.job.model.config.vocab)
    if found.trained < found.parameters:
        moved += program.adapter_traffic * tokens * sizes.layers * sizes.results
    moved += program.routed_traffic * tokens * sizes.layers * sizes.routed
    seconds = program.host_s + moved / (hardware.bandwidth * hardware.efficiency.memory)
    if row.remat == "selective" and program.every_other:
        again = 2.0 * tokens * sizes.layers * sizes.second_weights
        seconds += again / (hardware.half * hardware.efficiency.product)
    return seconds


class LayerSizes(NamedTuple):
    """Sizes of a layer's products.

    Attributes:
      layers: of the model.
      results: numbers that the products of a layer write for a token.
      second_results, second_weights: results and weights of every second product of a dense layer.
      adapted_inputs: inputs and results of the products of all experts of a layer; 0: it is dense.
      routed: numbers of a token's rows that go to experts; 0: it is dense.
    """

    layers: int
    results: int
    second_results: int
    second_weights: int
    adapted_inputs: int
    routed: int


def layer_sizes(row: Row) -> LayerSizes:
    """Sizes of the products of a row's model: q, k, v, o, gate, up, down."""
    config = json.loads(DATA.read_text())["models"][row.model]
    embed, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    head = config.get("head_dim", embed // heads)
    keys = config["num_key_value_heads"] * head
    chosen = config.get("num_experts_per_tok", 1)
    mlp = config.get("moe_intermediate_size", config["intermediate_size"])
    experts = config.get("num_experts", config.get("n_routed_experts", 0))
    results = heads * head + 2 * keys + embed + chosen * (2 * mlp + embed)
    second = embed * keys + heads * head * embed + embed * mlp
    routed = chosen * embed if experts else 0
    return LayerSizes(layers, results, keys + embed + mlp, second, experts * 3 * (embed + mlp), routed)


def update_costs(row: Row) -> tuple[list[Costs], Estimate]:
    """Costs of a row's update, and the estimate that has them."""
    hardware = hardware_for(row)
    with config_of(row) as config:
        job = plain_job(settings_for(row, config), recipe("sft")(), hardware.memory)
        found = estimate(job, row.tokens, hardware)
    return [costs for name, costs in found.phases.items() if name.startswith(UPDATES)], found


# Of NeMo RL's rows: 2,048 samples, 512 an update, packed into 4,096 tokens (`train_micro_batch_size: 1`; four times as
# many to score), by examples/configs/recipes/llm/performance of 0.4 and 0.6. Nothing is recomputed.
PROMPTS, SAMPLES, MINIBATCHES, PROMPT = 64, 32, 4, 150
ITERATION_S = 0.013  # of an iteration of its engine beyond funrl's, fitted


def sampled_seconds(row: Row) -> float:
    """Seconds of a step that samples, scores and learns by turns, by the simulation of its completions."""
    hardware = hardware_for(row)
    assert row.mean_tokens is not None
    most = row.tokens - PROMPT
    with config_of(row) as config:
        settings = settings_of(
            model=config,
            mesh=row.mesh,
            fsdp=True,
            dtype="bfloat16",
            remat=row.remat,
            batch_prompts=PROMPTS,
            samples_per_prompt=SAMPLES,
            minibatches=MINIBATCHES,
            max_new_tokens=most,
            token_budget=row.tokens,
            score_token_budget=4 * row.tokens,
            dry_run=True,
            prompt_tokens=PROMPT,
            lengths=f"mean:{row.mean_tokens - PROMPT},max:{most}",
            **row.flags,
        )
        job = plain_job(settings, recipe("grpo")(), hardware.memory)
        assert isinstance(job, RLJob)
        work = Workload(lengths_of(settings, most), PROMPT, hardware)
        alone = with_flags(settings, generate_mesh=None)
        trainer = traced_ranks(alone, recipe("grpo")(), work.lengths, work.rank())
    _, run = shared_split(job, trainer, row.gpus, work, rule_of(settings))
    engine = run.engine._replace(fixed=run.engine.fixed + ITERATION_S)
    return simulate_rule(run._replace(engine=engine), run.rule).step


STATE_BYTES = 16  # of a trained weight: weight, gradient and moments in float32


BACKWARD = ("backward", "activations")


def peak_bytes(row: Row, found: Estimate, costs: Costs) -> float:
    """Bytes of a device that the peer's allocator has in use.

    A peer adds gradients to those of earlier micro-batches in place, and NCCL's memory is not of its allocator.
    """
    program = PROGRAMS[row.program]
    sizes = layer_sizes(row)
    config = found.job.model.config
    learns = found.trained == found.parameters
    split = parse(row.mesh)
    gradients = costs.peaks["optimizer"].get("gradients", 0.0)
    logits = program.logit_bytes * row.rows * row.tokens * config.vocab / (split["tensor"] * split["sequence"])
    table = 2.0 * (1 + learns) * config.vocab * config.embed * (program.keeps_table and config.tied)
    backward = table + program.routed_bytes * row.rows * row.tokens * sizes.routed
    held = []
    for part, kinds in costs.peaks.items():
        nbytes = sum(kinds.values()) - kinds.get("communicators", 0.0)
        nbytes -= max(0.0, kinds.get("gradients", 0.0) - gradients)
        nbytes += max(0.0, logits - kinds.get("logits", 0.0)) * (part == "forward")
        held.append(nbytes + backward * (part in BACKWARD))
    most = max(held)
    if row.remat == "selective" and program.every_other:
        most -= 2.0 * row.rows * row.tokens * sizes.layers * sizes.second_results
    if learns:
        return most
    rank = row.flags["lora_rank"]
    adapted = (program.adapters - 1) * found.trained + program.adapters * sizes.layers * sizes.adapted_inputs * rank
    further = (program.frozen_bytes - 2) * found.parameters + STATE_BYTES * adapted * (program.adapters > 1)
    return most + further / devices(split)


AIMS = {"seconds": 0.15, "gib": 0.1}  # errors that an estimate should stay below
README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- rows: written by benchmarks/published.py -->", "<!-- end of the rows -->"


def errors_of(shares: Sequence[float]) -> Errors:
    """Summarize errors, as shares of what was published."""
    sizes = sorted(map(abs, shares))
    return Errors(len(sizes), statistics.median(sizes), sizes[math.ceil(0.9 * len(sizes)) - 1])


def row_line(row: Row, predicted: Predicted) -> str:
    """The line of a table for a row."""
    cells = [row.name, "fitted" if row.fitted else "tested"]
    for kind in AIMS:
        published = getattr(row, kind)
        number = getattr(predicted, kind)
        share = "-" if published is None else f"{number / published - 1:+.0%}"
        cells += ["-" if published is None else f"{published:.3g}", f"{number:.3g}" if number else "-", share]
    return f"| {' | '.join(cells)} |"


def errors_lines(predictions: Sequence[tuple[Row, Predicted]]) -> list[str]:
    """Lines that summarize the errors of fitted and of tested rows."""
    lines = ["| | rows | median | nine of ten within | within the aim |", "|---|---|---|---|---|"]
    for kind, aim in AIMS.items():
        for fitted in (True, False):
            rows = [(row, getattr(it, kind)) for row, it in predictions if row.fitted == fitted]
            shares = [number / getattr(row, kind) - 1 for row, number in rows if getattr(row, kind) is not None]
            if shares:
                found = errors_of(shares)
                name = f"{'memory' if kind == 'gib' else kind}, {'fitted' if fitted else 'tested'}"
                within = sum(abs(share) <= aim for share in shares)
                cells = (name, str(found.count), f"{found.median:.1%}", f"{found.most:.1%}", f"{within} in {aim:.0%}")
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    wanted = next((word.removeprefix("--rows=") for word in sys.argv[1:] if word.startswith("--rows=")), "")
    rows = [row for row in read_rows() if re.search(wanted, row.name)]
    lines = ["| row | | s | dry run | error | GiB | dry run | error |", "|---|---|---|---|---|---|---|---|"]
    predictions = []
    for row in (row for row in rows if not row.reason):
        predictions.append((row, predict(row)))
        lines.append(row_line(*predictions[-1]))
        print(lines[-1], flush=True)
    summary = errors_lines(predictions)
    reasons = [f"| {row.name} | {row.reason} |" for row in rows if row.reason]
    left_out = ["| not expressed | |", "|---|---|", *reasons] if reasons else []
    print("\n".join(["", *summary, "", *left_out]))
    if "--write" in sys.argv and not wanted:
        text = README.read_text()
        begin = text.index(BEGIN) + len(BEGIN)
        table = "\n".join(["", *summary, "", *lines, "", *left_out, ""])
        README.write_text(text[:begin] + table + text[text.index(END) :])


if __name__ == "__main__":
    main()
