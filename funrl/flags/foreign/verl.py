"""Names of verl 0.9.1: the dotted names of its ppo_trainer.yaml. Its batches and mini-batches count prompts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction

from funrl.flags.foreign.meaning import (
    COMMON_VALUES,
    DifferentError,
    Library,
    NameQuery,
    read_names,
    whole,
)

_TABLE = """
[algorithm.]
adv_estimator | gdpo | differs experiment={experiment} | verl's last deviation is over tokens, here it is over rows
  | gmpo | differs experiment={experiment} | verl's loss grows with the number of micro-batches
  | gpg,opo | differs experiment={experiment} | verl takes the clipped loss, here it is the plain policy gradient
  | actor_rollout_ref.rollout.n=1 =grpo,rloo,reinforce_plus_plus_baseline | differs experiment={experiment} | the \
advantage of a prompt's only completion is its reward in verl, 0 here
  | | experiment={experiment}
norm_adv_by_std_in_grpo | =true | -
  | gspo,sapo,cispo,dppo,gmpo | differs | {recipe} divides by the deviation of the group
  | grpo,dr_grpo | experiment=dr_grpo | dr_grpo: no division by the deviation, nor by the length
gamma | --gamma | gamma={}
lam | --gae_lambda | gae_lambda={}
gamma lam | | - | {recipe} does not read it, here and in verl
use_kl_in_reward kl_penalty kl_ctrl.kl_coef kl_ctrl.type kl_ctrl.target_kl kl_ctrl.horizon \
  | !use_kl_in_reward? --kl_target | kl_coef=0.0
  | !use_kl_in_reward? | -
  | !--kl_target | differs | {recipe} has no KL in the reward; ppo, rloo and remax do
  | !kl_penalty=none,kl,k1 | differs kl_coef={kl_ctrl.kl_coef} | the KL in a reward is k1, verl's kl_penalty=kl
  | !kl_ctrl.horizon=none,10000 | differs | an adaptive coefficient has a horizon of 10000 rows
  | kl_ctrl.type=adaptive | kl_coef={kl_ctrl.kl_coef} kl_target={kl_ctrl.target_kl} | it counts nats a token
  | | kl_coef={kl_ctrl.kl_coef}
rollout_correction.rollout_is rollout_correction.rollout_rs | !=none | differs | {correction}
rollout_correction.bypass_mode | ? !dppo | differs | {correction}
  | dppo | sampled_by={sampler}
rollout_correction.loss_type | | only ppo_clip | the loss is that of the recipe
filter_groups.enable | | only false | `funrl dapo` samples prompts until their rewards differ
use_pf_ppo | | only false | `funrl pf_ppo` resamples rows
[actor_rollout_ref.model.]
path | | model={}
enable_gradient_checkpointing | ? | remat=full
  | | remat=none
lora_rank lora_alpha target_modules exclude_modules | lora_rank=0,none | -
lora_rank | | lora_rank={} lora_alpha={lora_alpha} lora_targets={target_modules}
lora_alpha | | lora_alpha={}
target_modules | | lora_targets={}
exclude_modules | !=none | differs | --lora_targets names what has adapters; none is excluded
lora.rank | | only 0 | give actor_rollout_ref.model.lora_rank
custom_chat_template | | only none | give --chat_template=FILE.jinja
[actor_rollout_ref.actor.]
policy_loss.loss_mode | dppo =dppo_tv | kind=tv sampled_by={sampler}
  | dppo | kind=kl sampled_by={sampler}
  | gspo | per_token=true | verl's gradient is that of GSPO-token
ppo_mini_batch_size | | minibatches={minibatches} | verl gives the prompts of one, here it is how many there are
ppo_max_token_len_per_gpu | | token_budget={}
ppo_epochs | | epochs={}
optim.lr | | lr={}
optim.weight_decay | =0 | weight_decay={}
  | | weight_decay={} decay_all=true
optim.lr_warmup_steps optim.lr_warmup_steps_ratio | !warmup | -
  | several_updates | differs lr_warmup_steps={warmup} | {stairs}
  | | lr_warmup_steps={warmup} | lr_warmup_steps, or its ratio of {steps} steps
optim.warmup_style optim.lr_scheduler_type | =none | -
  | =constant | lr_schedule={}
  | =cosine several_updates | differs lr_schedule={} | {stairs}
  | =cosine | lr_schedule={}
  | | differs | {} is not one of constant, cosine: --lr_schedule has these and linear
optim.clip_grad grad_clip | | max_grad_norm={}
optim.betas | | only 0.9,0.999 | AdamW's averages have 0.9 and 0.999
optim.optimizer | | only adamw | verl's other optimizers have no equal; --optimizer has adamw and muon
optim.min_lr_ratio | | only 0 | --lr_schedule ends at 0
optim.num_cycles | | only 0.5 | --lr_schedule=cosine is half a cosine
clip_ratio | clip_ratio_low=none --clip_low | clip_low={} clip_high={}
  | | - | verl reads clip_ratio_low and clip_ratio_high, each 0.2 if it is not given
clip_ratio_low | dppo | low={}
  | --clip_low | clip_low={}
clip_ratio_high | dppo | high={}
  | --clip_high | clip_high={}
clip_ratio_low clip_ratio_high | | - | {recipe} has no clip, here and in verl
clip_ratio_c | dppo | cap={}
  | --dual_clip | dual_clip={}
  | gspo,sapo,cispo,gmpo,gpg,opo | - | {recipe} bounds no ratio of a negative advantage, here and in verl
  | several_updates | differs | verl bounds ratios of negative advantages at {}, {recipe} does not; with one update a \
batch all ratios are 1
  | | - | with one update a batch all ratios are 1
tau_pos | --positive | positive={}
tau_neg | --negative | negative={}
tau_pos tau_neg | | - | {recipe} does not read it, here and in verl
entropy_coeff | | entropy_coef={}
use_kl_loss kl_loss_coef kl_loss_type | !use_kl_loss? --kl_coef !--kl_target | kl_coef=0.0
  | !use_kl_loss? | -
  | --kl_target | differs | {recipe} has no KL in the loss; grpo does
  | !--kl_coef | differs | {recipe} has no KL in the loss; grpo does
  | !kl_kind | differs kl_coef={kl_loss_coef} | {kl_loss_type}: --kl_kind has k1, k2, k3 and abs, each with +
  | --kl_kind | kl_coef={kl_loss_coef} kl_kind={kl_kind} | verl clamps k3 to +-10
  | kl_loss_type=none,k3,low_var_kl | kl_coef={kl_loss_coef} | verl clamps k3 to +-10
  | | differs kl_coef={kl_loss_coef} | the KL of {recipe} is k3, which grpo's --kl_kind chooses
loss_agg_mode | grpo =token-mean | per_sequence=false | verl takes it of each mini-batch, as here
  | grpo =seq-mean-token-mean | per_sequence=true | verl takes it of each mini-batch, as here
  | rloo,remax,opo =seq-mean-token-sum | -
  | gspo,sapo,gmpo,gdpo =seq-mean-token-mean | -
  | sapo !use_kl_loss? entropy_coeff=0,none | - | verl's sapo takes the mean of each completion whatever it is
  | dr_grpo =seq-mean-token-sum-norm loss_scale_factor={max_response_length} | - | dr_grpo divides by --max_new_tokens
  | dr_grpo =seq-mean-token-sum-norm | differs | verl divides by the width of the padded batch unless \
loss_scale_factor={max_response_length} is given, here by --max_new_tokens
  | !grpo,rloo,remax,opo,gspo,sapo,gmpo,gdpo,dr_grpo =token-mean | -
  | | differs | {recipe} reduces its loss in another way than {}: the size of a gradient and the weight of long \
completions differ
loss_scale_factor | | -
freeze_vision_tower | ? | - | the tower is frozen by default, and its projector learns
  | | freeze=none
[actor_rollout_ref.rollout.]
n | | samples_per_prompt={}
temperature | | temperature={}
top_p | | top_p={}
top_k | =-1 | top_k=0
  | | top_k={}
do_sample | | only true | completions are sampled
val_kwargs.n | | eval_samples={}
val_kwargs.do_sample | ? | eval_temperature={val_kwargs.temperature}
  | | eval_temperature=0
val_kwargs.temperature | val_kwargs.do_sample? | eval_temperature={}
  | | eval_temperature=0 | greedy without do_sample
val_kwargs.top_p | val_kwargs.do_sample? | eval_top_p={}
  | | eval_top_p=1.0 | greedy without do_sample
val_kwargs.top_k | val_kwargs.do_sample? !=-1 | eval_top_k={}
  | | eval_top_k=0 | greedy without do_sample
name | =vllm,hf | engine={}
  | | - | there is no {}, the native engine generates; --engine has vllm, vllm_server and hf too
dtype | =bfloat16,float32 | dtype={} | of training and generation; master weights are float32
  | | differs | {} is not one of bfloat16, float32: --dtype has these
max_num_seqs | | decode_rows={}
gpu_memory_utilization | | - | the cache's size is --kv_cache_gb, in 1e9 bytes
log_prob_max_token_len_per_gpu | | score_token_budget={}
repetition_penalty | | only 1 | give --repetition_penalty
[critic.]
optim.lr cliprange_value optim.weight_decay grad_clip ppo_epochs ppo_mini_batch_size loss_agg_mode model.path \
optim.lr_warmup_steps_ratio | !ppo,vapo | - | {recipe} has no critic
optim.lr | | critic_lr={}
cliprange_value | | value_clip={}
optim.weight_decay | =none,{actor.optim.weight_decay} | -
grad_clip | =none,{actor.grad_clip} | -
ppo_epochs | =none,{actor.ppo_epochs} | -
ppo_mini_batch_size | =none,{actor.ppo_mini_batch_size} | -
loss_agg_mode | =none,{actor.loss_agg_mode} | -
optim.weight_decay grad_clip ppo_epochs ppo_mini_batch_size loss_agg_mode | | differs | critic and policy share the \
actor's value here
optim.lr_warmup_steps_ratio | | only 0 | the schedule of the critic is that of the policy
model.path | actor_rollout_ref.model.path=none | - | the critic begins as the policy
  | ={actor_rollout_ref.model.path} | - | the critic begins as the policy
  | | differs | the critic begins as the policy, {actor_rollout_ref.model.path}
[data.]
train_files | | prompts={list}
val_files | | eval_data={list}
prompt_key | !=prompt,question | fields=prompt:{}
train_batch_size | | batch_prompts={}
gen_batch_size | | only none | a step completes --batch_prompts prompts
max_response_length | | max_new_tokens={}
max_prompt_length | | max_prompt_tokens={}
filter_overlong_prompts truncation | filter_overlong_prompts? | long_prompts=drop | verl drops such prompts before it \
would cut them
  | data.truncation=error,none | long_prompts=error
  | data.truncation=left | long_prompts=truncate
  | | differs | {data.truncation} is not one of error, left: --long_prompts=truncate keeps the last tokens
seed | !=none | seed={}
shuffle | | only true | prompts come in a shuffled order, by --seed
train_max_samples | | only -1 | all records are used; give a file of some
[trainer.]
total_training_steps | !=-1,none | steps={}
total_epochs | !total_training_steps=-1,none | - | total_training_steps is given, which counts
  | !has_records | differs | a run's length is --steps here: epochs x prompts / --batch_prompts, which \
`funrl import --records=N` computes
  | | steps={steps} | {} epochs over {records} records
save_freq | =-1,0 | save_every=0
  | | save_every={}
test_freq | =-1,0 | - | the first and last steps always evaluate
  | | eval_every={}
critic_warmup | ppo,vapo | critic_warmup_steps={}
  | | - | {recipe} has no critic
default_local_dir | | run_dir={} | one that holds a run is refused
logger | | report_to={trackers} | TensorBoard and JSON lines are always written
project_name experiment_name resume_mode val_before_train | | - | it decides no number of a run; leave it out
v1.trainer_mode | | only sync | training and generation take turns
val_only | | only false | `funrl evaluate` evaluates
[]
trainer.nnodes trainer.n_gpus_per_node actor_rollout_ref.actor.strategy \
actor_rollout_ref.actor.ulysses_sequence_parallel_size actor_rollout_ref.rollout.tensor_model_parallel_size \
| | mesh={mesh} fsdp={fsdp} generate_mesh={generate_mesh} | the same devices train and generate
actor_rollout_ref.actor.fsdp_config.param_offload actor_rollout_ref.actor.fsdp_config.optimizer_offload \
actor_rollout_ref.ref.fsdp_config.param_offload | | offload={offload}
algorithm.rollout_correction.rollout_is_batch_normalize actor_rollout_ref.model.lora_adapter_path \
actor_rollout_ref.model.override_config actor_rollout_ref.model.mtp.enable \
actor_rollout_ref.actor.fsdp_config.qat.enable actor_rollout_ref.rollout.multi_turn.enable \
actor_rollout_ref.rollout.ignore_eos actor_rollout_ref.rollout.quantization data.tool_config_path data.custom_cls.path \
| | only false | there is no such thing here; leave it out
custom_reward_function.path custom_reward_function.name reward.custom_reward_function.path \
reward.custom_reward_function.name | custom_reward_function.path=none | -
  | custom_reward_function.name=none | reward={custom_reward_function.path}:compute_score | {reward_arguments}
  | | reward={custom_reward_function.path}:{custom_reward_function.name} | {reward_arguments}
reward_model.enable reward.reward_model.enable | | -
reward_model.model.path reward.reward_model.model_path | reward_model.enable? !=none | reward_model={}
reward_model.reward_manager reward.reward_manager.name | | only naive | a reward is --reward and --reward_model
distillation.enabled | | only false | `funrl distillation` and `funrl gkd` distil
"""
# Defaults of its ppo_trainer.yaml that differ from ours or affect the meaning of other names.
DEFAULTS = {
    prefix + pair.split("=")[0]: pair.split("=")[1]
    for prefix, pairs in {
        "data.": "train_batch_size=1024 max_response_length=512 max_prompt_length=512 truncation=error",
        "actor_rollout_ref.actor.": "ppo_mini_batch_size=256 ppo_epochs=1 optim.lr=1e-6 optim.weight_decay=0.01 "
        "clip_ratio=0.2 clip_ratio_low=0.2 clip_ratio_high=0.2 clip_ratio_c=3.0 loss_agg_mode=token-mean "
        "entropy_coeff=0 use_kl_loss=false kl_loss_coef=0.001 kl_loss_type=low_var_kl grad_clip=1.0 strategy=fsdp "
        "tau_pos=1.0 tau_neg=1.05",
        "actor_rollout_ref.rollout.": "n=1 dtype=bfloat16 val_kwargs.do_sample=false temperature=1.0 "
        "tensor_model_parallel_size=2",
        "actor_rollout_ref.model.": "enable_gradient_checkpointing=true lora_alpha=16 target_modules=all-linear",
        "critic.": "optim.lr=1e-5 cliprange_value=0.5",
        "algorithm.": "adv_estimator=gae gamma=1.0 lam=1.0 norm_adv_by_std_in_grpo=true use_kl_in_reward=false "
        "kl_ctrl.kl_coef=0.001 kl_ctrl.type=fixed",
        "trainer.": "nnodes=1 n_gpus_per_node=8 save_freq=-1 test_freq=-1 total_epochs=30",
    }.items()
    for pair in pairs.split()
}
# Names that change only memory, speed, files or output.
_IDLE = re.compile(
    r"""
    (trainer|reward|reward_model|critic|data|actor_rollout_ref\.\w+)\.((.*\.)?(profiler|checkpoint|wrap_policy|trace
    |checkpoint_engine|engine_kwargs|fused_kernel_options|tiled_mlp|agent|disaggregation|prometheus|skip)\..*|.*_workers
    |.*micro_batch_size(_per_gpu)?|.*use_dynamic_bsz|.*token_len_per_gpu|(.*\.)?trust_remote_code)
    |(global_profiler|skip|transfer_queue|ray_init|sandbox_fusion|reward\.sandbox_fusion|distillation)\..*
    |trainer\.(balance_batch|log_val_generations|rollout_data_dir|validation_data_dir|resume_from_path|device|use_v1
    |default_hdfs_dir|del_local_ckpt_after_load|max_actor_ckpt_to_keep|max_critic_ckpt_to_keep|esi_redundant_time
    |ray_wait_register_center_timeout|use_legacy_worker_impl)
    |data\.(use_shm|tokenizer|val_batch_size|val_max_samples|validation_shuffle|return_\w+|reward_fn_key|image_key
    |video_key|audio_key|image_patch_size|filter_overlong_prompts_workers)
    |actor_rollout_ref\.(hybrid_engine|nccl_timeout|model\.use_remove_padding)
    |critic\.(strategy|ulysses_sequence_parallel_size|model\.(use_remove_padding|enable_gradient_checkpointing))
    |critic\.model\.fsdp_config\.(param|optimizer)_offload
    |(actor_rollout_ref\.model|critic\.model)\.(use_shm|tokenizer_path|hf_config_path|external_lib|use_liger
    |use_fused_kernels|enable_activation_offload)
    |actor_rollout_ref\.rollout\.(mode|seed|full_determinism|load_format|layered_summon|enforce_eager|free_cache_engine
    |cudagraph_capture_sizes|data_parallel_size|expert_parallel_size|max_num_batched_tokens|max_model_len|prompt_length
    |response_length|enable_chunked_prefill|enable_prefix_caching|logprobs_mode|scheduling_policy|disable_log_stats
    |skip_tokenizer_init|calculate_log_probs|log_prob_use_dynamic_bsz|nnodes|n_gpus_per_node
    |update_weights_bucket_megabytes|multi_stage_wake_up)
    |(actor_rollout_ref\.(actor|ref)|critic)\.(use_torch_compile|shuffle|data_loader_seed|rollout_n|forward_prefetch
    |entropy_from_logits_with_chunking|entropy_checkpointing|calculate_entropy|use_remove_padding|use_fused_kernels
    |use_prefix_grouper|calculate_sum_pi_squared|fsdp_config\.(fsdp_size|forward_prefetch|reshard_after_forward
    |offload_policy|use_orig_params|use_torch_compile|seed|full_determinism|strategy|entropy_\w+))
    |algorithm\.(filter_groups|pf_ppo|rollout_correction)\.\w+|reward(_model)?\.model\.external_lib
    """,
    re.VERBOSE,
)


def is_of_verl(name: str) -> bool:
    """True for a name in a section of verl's configuration."""
    sections = "actor_rollout_ref data algorithm trainer critic reward reward_model custom_reward_function"
    return "." in name and name.partition(".")[0] in sections.split()


def recipe_of(theirs: Mapping[str, str]) -> str:
    """The recipe of an advantage estimator and a policy loss. Raises: DifferentError."""
    estimator = theirs.get("algorithm.adv_estimator", "gae").lower()
    loss = theirs.get("actor_rollout_ref.actor.policy_loss.loss_mode", "vanilla")
    undivided = theirs.get("algorithm.norm_adv_by_std_in_grpo", "true").lower() == "false"
    alone = ("grpo", "rloo", "remax", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gpg", "gdpo")
    recipes = {(name, "vanilla"): name for name in alone} | {("grpo", name): name for name in ("gspo", "sapo", "cispo")}
    recipes |= {("gae", "vanilla"): "ppo", ("rloo_vectorized", "vanilla"): "rloo", ("gpg", "gpg"): "gpg"}
    recipes |= {("optimal_token_baseline", "vanilla"): "otb", ("grpo", "geo_mean"): "gmpo"}
    recipes |= {("grpo", "dppo_tv"): "dppo", ("grpo", "dppo_kl"): "dppo"}
    if (estimator, loss) not in recipes:
        raise DifferentError(f"adv_estimator={estimator} with loss_mode={loss}: `funrl --help` lists all recipes")
    recipe = recipes[estimator, loss]
    return "dr_grpo" if recipe == "grpo" and undivided else recipe


def _minibatches(query: NameQuery) -> str:
    prompts = query.number("data.train_batch_size")
    size = query.number("actor.ppo_mini_batch_size")
    return whole(prompts / size, f"--minibatches ({prompts} prompts / {size})")


def _updates(query: NameQuery) -> Fraction:
    """Optimizer steps of a step."""
    return Fraction(_minibatches(query)) * query.number("actor.ppo_epochs")


def _steps(query: NameQuery) -> int:
    """Steps by total_training_steps, by the epochs over known records, or by --steps. Raises: DifferentError."""
    if query.given("total_training_steps") and query.number("total_training_steps") != -1:
        return int(query.number("total_training_steps"))
    if query.context.records is None:
        return int(query.context.ours["steps"])
    epoch_steps = math.floor(query.context.records / query.number("data.train_batch_size"))
    return max(int(epoch_steps * query.number("total_epochs")), 1)


def _warmup(query: NameQuery) -> int:
    """Optimizer steps of a warm-up, given in steps or as a share of all steps; 0: none."""
    steps = query.number("actor.optim.lr_warmup_steps")
    if steps <= 0:
        steps = Fraction(math.floor(query.number("actor.optim.lr_warmup_steps_ratio") * _steps(query)))
    return round(steps * _updates(query)) if steps > 0 else 0


def _devices(query: NameQuery) -> Fraction:
    return query.number("trainer.nnodes") * query.number("trainer.n_gpus_per_node")


def _mesh(query: NameQuery) -> str:
    split = query.number("actor.ulysses_sequence_parallel_size")
    sequence = f",sp{whole(split, '--mesh')}" if split > 1 else ""
    return f"dp{whole(_devices(query) / split, '--mesh')}{sequence}"


def _generate_mesh(query: NameQuery) -> str:
    tensor = query.number("actor_rollout_ref.rollout.tensor_model_parallel_size")
    if tensor == 1 or _devices(query) == 1:
        return ""
    return f"dp{whole(_devices(query) / tensor, '--generate_mesh')},tp{tensor}"


def _kl_kind(query: NameQuery) -> str:
    """The estimator of the KL; "" if verl's has no equivalent."""
    kind = query.value("kl_loss_type")
    kinds = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    return kinds[kind.rstrip("+")] + "+" * kind.endswith("+") if kind.rstrip("+") in kinds else ""


def _offload(query: NameQuery) -> str:
    parts = {"actor.fsdp_config.param_offload?": "params", "actor.fsdp_config.optimizer_offload?": "optimizer"}
    parts["ref.fsdp_config.param_offload?"] = "reference"
    return ",".join(part for condition, part in parts.items() if query.holds(condition))


VERL = Library(
    title="verl",
    rows=read_names(_TABLE),
    idle=_IDLE,
    defaults=DEFAULTS
    | {
        "actor_rollout_ref.actor.optim.lr_warmup_steps": "-1",
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "0",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "1",
        "actor_rollout_ref.rollout.val_kwargs.temperature": "0",
        "algorithm.kl_ctrl.target_kl": "0.1",
    },
    values=COMMON_VALUES
    | {
        "correction": lambda query: (
            "it changes the loss: a correction for the gap between engine and trainer is `corrected` with "
            "`importance_weights()` or `reject_ratio()` in a FILE.py, docs/algorithms.md"
        ),
        "experiment": lambda query: recipe_of(query.context.theirs),
        "fsdp": lambda query: (
            "true" if _devices(query) > 1 and query.value("actor.strategy").startswith("fsdp") else ""
        ),
        "generate_mesh": _generate_mesh,
        "kl_kind": _kl_kind,
        "mesh": _mesh,
        "minibatches": _minibatches,
        "offload": _offload,
        "reward_arguments": lambda query: "docs/rewards.md says with which arguments it is called",
        "sampler": lambda query: "rollout_logp" if query.holds("rollout_correction.bypass_mode?") else "old_logp",
        "several_updates": lambda query: _updates(query) > 1,
        "stairs": lambda query: (
            "verl's rate stays during a step and moves between steps, here it moves with every optimizer step"
        ),
        "steps": _steps,
        "warmup": _warmup,
    },
)
