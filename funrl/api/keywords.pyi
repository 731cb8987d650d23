"""Keywords of `funrl.train`, `funrl.evaluate` and `funrl.generate` with their types; written by tools/keywords.py."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

import numpy as np

TruthValue = bool | np.bool_
WholeValue = int | np.integer
NumberValue = float | np.integer | np.floating
TextValue = str | Path | float

class SharedKeywords(TypedDict, total=False):
    """Flags of a run and of `funrl evaluate`."""

    model_code: TextValue
    dtype: TextValue
    compile: TextValue
    fields: TextValue | None
    long_prompts: TextValue
    max_prompt_tokens: WholeValue | None
    prompt_template: TextValue | None
    system_prompt: TextValue | None
    few_shot: TextValue | None
    chat_template: TextValue | None
    tools: TextValue | None
    template_arguments: TextValue | None
    step_separator: TextValue | None
    reward_model: TextValue | None
    process_reward_model: TextValue | None
    reward_weights: TextValue | None
    on_reward_error: TextValue
    reward_workers: WholeValue | None
    reward_timeout: NumberValue | None
    judge: TextValue | None
    judge_template: TextValue | None
    judge_pattern: TextValue
    judge_max_new_tokens: WholeValue
    agents: TextValue | None
    episode_turns: WholeValue
    episode_tokens: WholeValue | None
    env_timeout: NumberValue
    episode_retries: WholeValue
    env_workers: WholeValue
    max_waiting: WholeValue
    tool_parser: TextValue | None
    tool_tokens: WholeValue
    history: TextValue
    env_check: TextValue
    assume_turns: WholeValue | None
    assume_turn_tokens: WholeValue | None
    assume_tool_seconds: NumberValue | None
    tool_trace: TextValue | None
    generate_mesh: TextValue | None
    device: TextValue | None
    timeout: WholeValue
    engine: TextValue
    engine_url: TextValue | None
    engine_timeout: NumberValue | None
    kv_cache_gb: NumberValue | None
    decode_rows: WholeValue
    speculate: WholeValue
    rollout_dtype: TextValue
    state_snapshot_tokens: WholeValue
    queue: TextValue
    max_new_tokens: WholeValue | None

class TrainKeywords(SharedKeywords, total=False):
    """Flags of a run alone, then the arguments of recipes."""

    resize_vocab: TruthValue
    teacher: TextValue | None
    teacher_top_k: WholeValue
    teacher_context: TextValue | None
    save_dtype: TextValue
    numerics: TextValue
    backend: TextValue
    task: TextValue
    data: TextValue | None
    max_text_tokens: WholeValue | None
    max_pixels: WholeValue | None
    difficulty: TextValue | None
    process_reward: TextValue | None
    steps: WholeValue
    batch_prompts: WholeValue
    warmstart_steps: WholeValue | None
    seed: WholeValue
    run_dir: TextValue | None
    save_every: TextValue
    keep_checkpoints: WholeValue
    save_rollouts: WholeValue
    keep_rollouts: WholeValue | None
    resume: TruthValue
    staleness: WholeValue
    window: WholeValue
    dry_run: TruthValue
    prompt_tokens: WholeValue | None
    text_tokens: WholeValue | None
    assume_pictures: WholeValue | None
    lengths: TextValue | None
    json: TruthValue
    hardware: TextValue | None
    place: TextValue | None
    sequence_parallel: TextValue
    split_residual: TextValue
    remat: TextValue
    offload: TextValue | None
    fsdp: TruthValue
    fsdp_axes: TextValue | None
    fsdp_models: TextValue | None
    grad_reduce_dtype: TextValue
    heartbeat: WholeValue
    stalled_after: WholeValue
    verify_sync: TruthValue
    on_gap: TextValue
    probe_sync_every: WholeValue
    samples_per_prompt: WholeValue
    new_tokens_per_step: WholeValue | None
    temperature: NumberValue
    top_k: WholeValue
    top_p: NumberValue
    min_p: NumberValue
    mask_replay: TruthValue
    raw_logp: TruthValue
    repetition_penalty: NumberValue
    max_refills: WholeValue
    empty_filter: TextValue
    lr: NumberValue | None
    critic_lr: NumberValue | None
    implicit_reward_lr: NumberValue | None
    critic_warmup_steps: WholeValue
    optimizer: TextValue
    lr_schedule: TextValue
    lr_warmup_steps: WholeValue
    weight_decay: NumberValue
    decay_all: TruthValue
    max_grad_norm: NumberValue
    freeze: TextValue | None
    follow: TextValue | None
    lora_rank: WholeValue | None
    lora_alpha: NumberValue | None
    lora_targets: TextValue
    adapter: TextValue | None
    base_format: TextValue
    router_aux_coef: NumberValue
    router_z_coef: NumberValue
    router_bias_rate: NumberValue
    router_replay: TruthValue
    epochs: WholeValue
    minibatches: WholeValue
    critic_updates: WholeValue
    max_skipped: WholeValue
    foreign_rows: TextValue
    token_budget: WholeValue
    score_token_budget: WholeValue | None
    eval_every: WholeValue
    eval_prompts: WholeValue
    eval_samples: WholeValue
    eval_temperature: NumberValue | None
    eval_top_k: WholeValue | None
    eval_top_p: NumberValue | None
    eval_min_p: NumberValue | None
    eval_repetition_penalty: NumberValue | None
    profile: TextValue | None
    profile_ranks: TextValue
    report_to: TextValue | None
    metrics_port: TextValue | None
    sample_every: WholeValue
    explain_every: WholeValue | None
    alpha: NumberValue
    baseline: NumberValue
    best_of: WholeValue
    beta: NumberValue
    cap: NumberValue
    center: NumberValue
    clip: NumberValue
    clip_high: NumberValue
    clip_low: NumberValue | None
    decay: NumberValue
    decay_steps: WholeValue
    desirable: NumberValue
    deviation: TruthValue
    direct: TruthValue
    divergence: TextValue
    divergence_alpha: NumberValue
    dual_clip: NumberValue | None
    dynamic: TruthValue
    easiest: NumberValue
    entropy_coef: NumberValue
    eta: NumberValue
    flow_beta: NumberValue
    future_high: NumberValue
    future_low: NumberValue
    gae_lambda: NumberValue
    gamma: NumberValue
    half_life: NumberValue
    hardest: NumberValue
    harmful: TruthValue
    high: NumberValue | None
    imitation_coef: NumberValue
    kind: TextValue | None
    kl_bias_corrected: TruthValue
    kl_coef: NumberValue
    kl_kind: TextValue
    kl_target: NumberValue | None
    length_alpha: NumberValue
    likelihood_coef: NumberValue
    loss: TextValue
    low: NumberValue | None
    margin: NumberValue | TruthValue | None
    max_divergence: NumberValue
    negative: NumberValue
    normalize: TruthValue
    observation_coef: NumberValue
    on_policy: TruthValue
    others: TruthValue
    outcome_coef: NumberValue
    overlong_buffer: WholeValue | None
    overlong_coef: NumberValue
    peak: NumberValue
    per_policy: TruthValue
    per_sequence: TruthValue
    per_token: TruthValue
    phi: TruthValue
    positive: NumberValue
    power: NumberValue
    process_coef: NumberValue
    proposers: WholeValue
    raw_tail: TruthValue
    rest: TruthValue
    reward_share: NumberValue
    safe_ratio: NumberValue | None
    sampled_by: TextValue
    scale: NumberValue
    second_moment: NumberValue
    smoothing: NumberValue | None
    std_eps: NumberValue
    step_coef: NumberValue
    subtree_sizes: TruthValue
    summaries: TruthValue
    tau: NumberValue
    threshold: NumberValue
    to_reference: TruthValue
    turn_coef: NumberValue
    turn_limit: WholeValue | None
    turns: TruthValue
    undesirable: NumberValue
    valley: NumberValue
    value_beta: NumberValue
    value_clip: NumberValue | None
    weight_bound: NumberValue | None

class EvaluateKeywords(SharedKeywords, total=False):
    """Flags of `funrl evaluate` alone."""

    mesh: TextValue
    samples: WholeValue
    temperature: NumberValue | None
    top_k: WholeValue | None
    top_p: NumberValue | None
    min_p: NumberValue | None
    repetition_penalty: NumberValue | None

class SamplingKeywords(TypedDict, total=False):
    """Fields of `Sampling`."""

    temperature: NumberValue
    top_k: WholeValue
    top_p: NumberValue
    max_new_tokens: WholeValue
    stop: tuple[int, ...]
    samples: WholeValue
    greedy: TruthValue
    min_p: NumberValue
    repetition_penalty: NumberValue
    stop_strings: tuple[str, ...]
