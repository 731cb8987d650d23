"""Names of TRL 1.16: of its GRPO, RLOO, DPO, KTO, CPO, ORPO, GKD, SFT and reward trainers.

TRL counts completions per device and accumulation step, and optimizer steps; here a step has --batch_prompts prompts
with --samples_per_prompt completions each over all devices, and makes --minibatches optimizer steps per pass.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

from funrl.flags.foreign.meaning import (
    COMMON_VALUES,
    DifferentError,
    Library,
    NameQuery,
    is_same,
    items,
    number_text,
    read_names,
    whole,
)

# Recipes that do not sample.
TEXT_RECIPES = frozenset(
    re.findall(r"\w+", "sft eaft asft dpo simpo cpo orpo alphapo tpo kto reward_model process_reward_model")
)
_TABLE = """
model_name_or_path | | model={}
model_revision | | only main | --model is a directory or what the local cache has; download the revision
trust_remote_code | | - | code of a repository is never run; --model_code=hf takes the classes of transformers
reward_model_name_or_path reward_model_path | | reward_model={}
teacher_model_name_or_path | !=none | teacher={}
dataset_name | file | {data_flag}={} | a tenth of the records is held out; --eval_data=FILE names others
  | | differs | {} is neither a file nor a directory; save it as parquet and give --{data_flag}=PATH
dataset_config | | only none | a configuration is a part of the dataset's name: NAME:CONFIG:SPLIT
dataset_train_split | | only train | a split is a part of the dataset's name: --{data_flag}=NAME:{}
dataset_test_split | | - | a split is a part of the dataset's name: --eval_data=NAME:{}
dataset_text_field | | only text | records have a prompt and a completion
reward_funcs | | reward={reward_functions} | called with a prompt and a completion, or as docs/rewards.md says
reward_weights | !=none | reward_weights={}
output_dir | | run_dir={} | one that holds a run is refused
learning_rate | | lr={}
per_device_train_batch_size gradient_accumulation_steps steps_per_generation generation_batch_size \
  | gkd | batch_prompts={batch_prompts} samples_per_prompt=1 minibatches=1 | TRL counts {batch}
  | texts | batch_prompts={batch_prompts} | TRL counts {batch}
  | | batch_prompts={batch_prompts} minibatches={minibatches} | TRL counts completions: {batch}; here prompts count
num_iterations num_ppo_epochs | | epochs={}
num_mini_batches | | minibatches={}
num_train_epochs | !max_steps=none,0,-1 | - | max_steps is given, which counts
  | !has_records | differs | the length of a run is --steps here: {} x prompts / --batch_prompts; --epochs are passes \
over one batch of rollouts, TRL's num_iterations; `funrl import --records=N` computes it
  | | steps={steps} | {} epochs over {records} records; of texts, TRL's last batch of an epoch may be smaller
max_steps | !=none,0,-1 | steps={steps} | TRL counts optimizer steps; a step here makes {updates}
eval_steps save_steps | =none,-1 | -
  | share | - | {} is a share of the run; give --eval_every=N or --save_every=N, in steps
eval_steps | | eval_every={events} | TRL counts optimizer steps; a step here makes {updates}
save_steps | | save_every={events} | TRL counts optimizer steps; a step here makes {updates}
save_total_limit | | keep_checkpoints={} | the best one is kept beside them
logging_steps logging_strategy | | - | metrics are written after every step; leave it out
eval_strategy | | - | give --eval_every=N, in steps
save_strategy | =no | save_every=0
  | | - | give --save_every=N, in steps
report_to | | report_to={trackers} | TensorBoard and JSON lines are always written
run_name logging_dir | | - | a run has the name of its directory: --run_dir
lr_scheduler_type | =constant,constant_with_warmup | lr_schedule=constant
  | =linear,cosine | lr_schedule={}
  | | differs | {} is not one of constant, linear, cosine: --lr_schedule has these
warmup_ratio warmup_steps | =0,none | -
  | lr_scheduler_type=constant | - | lr_scheduler_type=constant has no warm-up in TRL; constant_with_warmup has
warmup_steps | !share | lr_warmup_steps={}
warmup_ratio warmup_steps | | lr_warmup_steps={warmup} | {} of {all_updates} optimizer steps
weight_decay | | weight_decay={}
max_grad_norm | =0 | differs max_grad_norm=1e9 | gradients always have a bound here; give a large --max_grad_norm
  | | max_grad_norm={}
seed | | seed={} | its random numbers are others
optim | =adamw,adamw_torch,adamw_torch_fused | optimizer=adamw
  | | differs | --optimizer=adamw is its adamw_torch; its muon has other factors than --optimizer=muon
adam_beta1 | | only 0.9 | AdamW's averages have 0.9 and 0.999
adam_beta2 | | only 0.999 | AdamW's averages have 0.9 and 0.999
adam_epsilon | | only 1e-8 | AdamW's eps is 1e-8
lr_scheduler_kwargs neftune_noise_alpha generation_kwargs off_policy_mask_threshold lora_modules_to_save use_rslora \
use_dora cast_lm_head_to_fp32 sync_ref_model dataloader_drop_last group_by_length assistant_only_loss \
dataset_streaming | | only false | there is no such thing here; leave it out
label_smoothing_factor | | only 0 | the labels of a likelihood are taken as they are
gradient_checkpointing | ? | remat=full
  | | remat=none
bf16 | =none | dtype=bfloat16
  | ? | dtype=bfloat16
  | | dtype=float32
fp16 | | only false | there is no float16; --dtype=bfloat16 keeps float32 master weights
torch_dtype dtype | =bfloat16,torch.bfloat16 | dtype=bfloat16 | weights that learn stay float32
  | !=float32,torch.float32 | differs | --dtype has bfloat16, float32 and float64
  | complete !bf16=false | - | of the weights; passes compute in what bf16 says
  | | dtype=float32
use_vllm | !? | - | the native engine generates
  | complete grpo,dr_grpo,gspo,cispo,sapo !vllm_importance_sampling_correction=false | differs engine={engine} | \
{correction}
  | | engine={engine}
vllm_mode | complete !use_vllm? | - | use_vllm is not set
  | =colocate,server | engine={engine}
  | | differs | --engine has vllm and vllm_server
vllm_server_base_url | !=none | engine_url={}
vllm_server_timeout | | engine_timeout={}
vllm_gpu_memory_utilization | | - | the cache's size is --kv_cache_gb, in 1e9 bytes
vllm_tensor_parallel_size | | - | the mesh to generate on is --generate_mesh, such as dp4,tp2
vllm_importance_sampling_correction | =false | - | {correction}
  | complete !use_vllm? | - | use_vllm is not set
  | | differs | {correction}
num_generations | | samples_per_prompt={}
num_generations_eval | !=none | eval_samples={}
max_completion_length response_length max_new_tokens | | max_new_tokens={}
max_prompt_length | =none | -
  | texts | differs | the limit of a prompt and its completion together is --max_text_tokens
  | | max_prompt_tokens={} long_prompts=truncate | to a prompt's last tokens; --long_prompts has others
max_length max_seq_length | !texts | differs | the limits are --max_prompt_tokens and --max_new_tokens
  | =none | - | the model's positions are the limit
  | reward_model | max_text_tokens={} long_prompts=drop
  | | max_text_tokens={} long_prompts=error | TRL cuts the end of a longer text; here it stops the run: --long_prompts
truncation_mode | | only keep_start | a longer text stops the run, or is cut by --long_prompts
packing | =false,none | - | rows are packed end to end to --token_budget, which changes no number
  | complete | differs | TRL's batches then count rows of several texts; --batch_prompts counts texts
  | | - | rows are always packed end to end; leave it out
temperature | gkd !=1 | differs temperature={} | TRL samples at it and takes the divergence at 1, here both are one
  | | temperature={}
top_p | | top_p={}
top_k | =-1,none | top_k=0
  | | top_k={}
min_p | !=none | min_p={}
repetition_penalty | | repetition_penalty={}
chat_template_kwargs | | only none | give --template_arguments=NAME:VALUE
beta kl_coef | orpo | differs beta={} | TRL's likelihood is of the prompt too, here of the completion alone
  | dpo,kto,cpo,simpo,alphapo,gkd,online_dpo | beta={}
  | !--kl_coef =0 | -
  | !--kl_coef | differs | {recipe} has no KL to a reference, so no --kl_coef
  | rloo,ppo | kl_coef={} | the KL is subtracted from the reward, with estimator k1, as in TRL
  | =0 | kl_coef={}
  | use_bias_correction_kl=false | kl_coef={} | the KL is in the loss, with estimator k3, as in TRL
  | --kl_bias_corrected | kl_coef={} kl_bias_corrected=true | k3 in the loss, times the ratio, as TRL's
  | | differs kl_coef={} | TRL weighs the KL by the ratio of its loss (use_bias_correction_kl), {recipe} does not
use_bias_correction_kl | | - | part of the meaning of beta: --kl_bias_corrected
epsilon_high | =none | -
epsilon epsilon_high cliprange | sapo | - | sapo has a gate and no clip
  | cispo | clip_low=none clip_high={cispo_bound} | TRL's bound is the ratio itself
epsilon cliprange | epsilon_high=none | clip_low={} clip_high={}
  | | clip_low={}
epsilon_high | | clip_high={}
cliprange_value | | value_clip={}
lam | | gae_lambda={}
delta | =none !--dual_clip | -
  | =none | dual_clip=none
  | cispo,sapo | - | TRL's {recipe} does not read it
  | below_clip | differs | a bound up to 1 + epsilon_high would bound all ratios
  | | dual_clip={} | the same for a bound above 1 + epsilon_high
loss_type | dpo !pair_loss | differs | of several losses give --loss=0.8*sigmoid+0.2*bco, of sft --likelihood_coef
  | dpo inexact | differs loss={pair_loss} | TRL takes aot of each micro-batch, and exo_pair needs label_smoothing
  | dpo =ipo,sigmoid_norm | loss={pair_loss} per_token=true
  | dpo =robust,aot,aot_unpaired | loss={pair_loss} smoothing={label_smoothing}
  | dpo | loss={pair_loss}
  | sft =dft | dynamic=true
  | sft =nll,chunked_nll | -
  | kto =kto accumulates | differs loss=kto | TRL takes the reference point of every micro-batch, here it is of the step
  | kto =kto | loss=kto
  | kto =apo_zero_unpaired | loss=apo_zero
  | cpo,simpo,alphapo =hinge,ipo | differs | cpo has no {}; its loss is TRL's sigmoid
  | cpo,simpo,alphapo | -
  | grpo =grpo | per_sequence=true
  | grpo =dapo several_updates | differs per_sequence=false | TRL divides each mini-batch by their mean number of tokens
  | grpo =bnpo accumulates | differs per_sequence=false | TRL's bnpo is a mean of the means of micro-batches
  | grpo =dapo,bnpo | per_sequence=false
  | gspo !=grpo | differs | gspo takes the mean of each completion, TRL's loss_type=grpo, not {}
  | gspo | -
  | cispo =cispo several_updates | differs | TRL divides each mini-batch by their mean number of tokens
  | dr_grpo,cispo,sapo ={recipe} | -
  | | differs | a loss is part of the algorithm here: TRL's dapo and bnpo are `funrl grpo --noper_sequence`, grpo, \
dr_grpo, cispo and sapo `funrl NAME`; this is {recipe}
loss_weights | | only none | of several losses of `dpo` give --loss=0.8*sigmoid+0.2*bco, of sft --likelihood_coef
f_alpha_divergence_coef | dpo | - | part of the meaning of f_divergence_type
  | | only none | {recipe} has no divergences
importance_sampling_level | gspo =sequence | -
  | !gspo =token | -
  | | differs | ratios of tokens are grpo's, those of sequences gspo's: `funrl gspo`
scale_rewards | grpo,dapo,gspo,cispo,sapo =group,true --std_eps | std_eps=1e-4
  | grpo,dapo,gspo,cispo,sapo =group,true | - | TRL adds 1e-4 to the deviation of a group
  | dr_grpo =none,false | -
  | | differs | grpo divides by the deviation of the group, dr_grpo by nothing, gdpo by the batch's; this is {recipe}
entropy_coef | =0 !--entropy_coef | -
  | =0 | entropy_coef={}
  | loss_type=dapo,bnpo,cispo,none !accumulates | entropy_coef={}
  | | differs entropy_coef={} | TRL takes the bonus of each micro-batch's tokens, here it is reduced as the loss is
sapo_temperature_pos | sapo | positive={}
sapo_temperature_neg | sapo | negative={}
sapo_temperature_pos sapo_temperature_neg | | - | only the loss sapo reads it
use_adaptive_entropy | | only false | `adaptive_entropy_bonus()` and `adapt_entropy()` of docs/pieces.md do it
top_entropy_quantile | | only 1 | `keep_highest_entropy()` of docs/pieces.md does it, with that share
multi_objective_aggregation | | only sum_then_normalize | `funrl gdpo` normalises each reward
mask_truncated_completions | | only false | completions that were cut short are trained on
normalize_advantages | ? | normalize=true per_sequence=true | one ratio a completion
  | | normalize=false per_sequence=true | one ratio a completion
reward_clip_range | | only none | `corrected` with `clip_reward(LOW, HIGH)` clips rewards
label_smoothing | =0 !--smoothing | -
  | --smoothing !loss_type=exo_pair,robust,aot,aot_unpaired | - | TRL reads it in exo_pair, robust and aot alone
  | | smoothing={}
rpo_alpha | !=none | likelihood_coef={}
f_divergence_type | =reverse_kl | divergence=reverse_kl
  | =forward_kl loss_type=sigmoid,none | divergence=forward_kl
  | =js_divergence loss_type=sigmoid,none | divergence=js
  | | differs | --divergence has forward_kl, js and alpha; it bends the ratios of all losses, TRL's of some
ld_alpha | !=none | length_alpha={}
use_weighting | ? | on_policy=true weight_bound=none | TRL's weights have no bound
discopop_tau | | only 0.05 | discopop's temperature is 0.05
desirable_weight | | desirable={}
undesirable_weight | | undesirable={}
cpo_alpha | simpo,alphapo =0 | -
  | simpo,alphapo !loss_type=alphapo | differs | {recipe} has no likelihood beside its contrast (cpo_alpha=0)
  | simpo,alphapo | -
  | !=0 accumulates | differs likelihood_coef={} | TRL's likelihood is a mean of the means of micro-batches
  | | likelihood_coef={}
simpo_gamma | simpo,alphapo | margin={}
  | | - | TRL reads it with simpo and alphapo alone
alpha | alphapo | alpha={}
  | cpo !=0 | differs | alpha bends the rewards of alphapo alone (loss_type=alphapo)
  | | - | TRL reads it with alphapo alone
lmbda | =1 | differs | TRL divides by the tokens of the data's completions, here by those that the student sampled
  | | differs | gkd learns from its own samples alone, which is lmbda=1, not {}
seq_kd | | only false | gkd learns from its own samples alone
completion_only_loss | | only true | the tokens of a prompt are not learned here
center_rewards_coefficient | !=none | center={}
use_peft | !? | -
  | !complete | lora_rank=16 lora_alpha=32 | TRL's defaults; adapters have no dropout here; also give --lora_targets
  | lora_target_modules=none | differs | lora_target_modules: PEFT's own choice depends on the model; name them
lora_r lora_alpha lora_dropout lora_target_modules | complete !use_peft? | - | TRL reads it with use_peft alone
lora_r | | lora_rank={} | TRL's defaults are a rank of 16 and an alpha of 32
lora_alpha | | lora_alpha={}
lora_dropout | | only 0 | adapters have no dropout here; leave it out
lora_target_modules | !=none | lora_targets={list}
load_in_4bit | ? use_peft? | base_format=nf4 | of the projections in the layers, on one device
load_in_4bit load_in_8bit | | only false | whole weights are not quantized, the base of adapters is: --base_format=nf4
bnb_4bit_quant_type | load_in_4bit? | only nf4 | its levels are those of NF4
use_bnb_nested_quant | load_in_4bit? | only false | scales of blocks stay in float32
average_tokens_across_devices | | only true | tokens are counted over all devices
router_aux_loss_coef | | only none | TRL's is of each micro-batch; --router_aux_coef is of the step
shuffle_dataset | !sft | only true | prompts and texts come in a shuffled order, by --seed
load_best_model_at_end | | only false | the model of the last step is in --run_dir; export has the best
torch_compile | | - | --compile says what is compiled
deepspeed fsdp fsdp_config | | - | weights, gradients and optimizer states are sharded by --fsdp
resume_from_checkpoint | | - | --resume --run_dir=RUN continues a run
activation_offloading attn_implementation dataloader_num_workers disable_dropout eval_on_start log_completions \
padding_free per_device_eval_batch_size precompute_ref_log_probs push_to_hub remove_unused_columns \
train_sampling_strategy use_liger_kernel | | - | it decides no number of a run; leave it out
"""


# Other names that change only memory, speed, files or output.
_IDLE = re.compile(
    r"""
    (bnb_4bit_quant|dataloader|ddp|eval|hub|log|logging|save|skip|ds3)_\w+
    |do_(eval|predict|train)|(data_seed|dataset_num_proc|debug|full_determinism|generate_during_eval|greater_is_better
    |gradient_checkpointing_kwargs|include_num_input_tokens_seen|is_encoder_decoder|jit_mode_eval|local_rank|pad_token
    |max_tool_calling_iterations|metric_for_best_model|num_completions_to_print|overwrite_output_dir|padding_value
    |pad_to_multiple_of|precompute_ref_batch_size|restore_callback_states_from_checkpoint|tf32|torch_empty_cache_steps
    |tp_size|use_bnb_nested_quant|use_cpu|entropy_(target|coef_(delta|max|min))|ref_model_(mixup_alpha|sync_steps))
    |vllm_(enable_sleep_mode|group_port|max_model_length|model_impl|server_(host|port)
    |importance_sampling_(cap|mode|clip_max|clip_min))
    """,
    re.VERBOSE,
)

# A trainer's recipe; names, and losses after "=", that it alone or first has; defaults that differ from ours or affect
# the meaning of other names. The first row is of all trainers.
_TRAINERS = """
all | | per_device_train_batch_size=8 gradient_accumulation_steps=1 num_train_epochs=3.0 lr_scheduler_type=linear \
gradient_checkpointing=true bf16=none weight_decay=0.0 max_grad_norm=1.0 \
lora_r=16 lora_alpha=32 lora_dropout=0.05 lora_target_modules=none
gkd | lmbda seq_kd teacher_model_name_or_path | learning_rate=2e-5 beta=0.5 lmbda=0.5 temperature=0.9 max_new_tokens=128
kto | desirable_weight undesirable_weight =kto =apo_zero_unpaired | learning_rate=1e-6 beta=0.1 max_length=1024 \
loss_type=kto desirable_weight=1.0 undesirable_weight=1.0 train_sampling_strategy=sequential
cpo | cpo_alpha simpo_gamma =simpo =alphapo | learning_rate=1e-6 beta=0.1 max_length=1024 label_smoothing=0.0 \
loss_type=sigmoid cpo_alpha=1.0 simpo_gamma=0.5 alpha=0.0
rloo | normalize_advantages reward_clip_range | num_generations=2 max_completion_length=512 num_iterations=1 \
epsilon=0.2 learning_rate=1e-6 temperature=1.0 top_p=1.0 top_k=0 repetition_penalty=1.0 beta=0.05 \
normalize_advantages=false
grpo | num_generations epsilon num_iterations reward_funcs scale_rewards epsilon_high \
=grpo =dapo =bnpo =dr_grpo =cispo =sapo =vespo =luspo | num_generations=8 max_completion_length=512 num_iterations=1 \
epsilon=0.2 learning_rate=1e-6 temperature=1.0 top_p=1.0 top_k=0 repetition_penalty=1.0 beta=0.0 delta=none \
loss_type=dapo scale_rewards=group entropy_coef=0.0 importance_sampling_level=token sapo_temperature_pos=1.0 \
sapo_temperature_neg=1.05
reward_model | center_rewards_coefficient | learning_rate=1e-4 max_length=1024
dpo | f_divergence_type use_weighting loss_weights ld_alpha rpo_alpha =exo_pair =nca_pair =robust =bco_pair \
=sppo_hard =aot =aot_unpaired =apo_zero =apo_down =discopop =sigmoid_norm | learning_rate=1e-6 beta=0.1 \
max_length=1024 label_smoothing=0.0 loss_type=sigmoid f_divergence_type=reverse_kl
sft | packing completion_only_loss assistant_only_loss dataset_text_field =nll =dft =chunked_nll | learning_rate=2e-5 \
loss_type=nll max_length=1024 completion_only_loss=none packing=false
orpo | | learning_rate=1e-6 beta=0.1 max_length=1024
"""
_OWN_NAMES: dict[str, set[str]] = {}
TRAINERS: dict[str, dict[str, str]] = {}
for _line in _TRAINERS.strip().splitlines():
    _trainer, _own, _defaults = map(str.strip, _line.split("|"))
    _OWN_NAMES[_trainer] = set(_own.split())
    TRAINERS[_trainer] = dict(pair.split("=") for pair in _defaults.split())
COMMON = TRAINERS.pop("all")


def guess_trainer(content: Mapping[str, str]) -> str | None:
    """The trainer of a configuration, by a name or loss that only it has; None if several are possible."""
    loss = content.get("loss_type", "")
    given = {*content, f"={loss}"}
    guesses = [trainer for trainer, own in _OWN_NAMES.items() if own & given]
    return guesses[0] if guesses else "dpo" if "," in loss or loss.startswith("[") else None


def recipe_of_trainer(trainer: str, theirs: Mapping[str, str]) -> str:
    """The recipe of a trainer's configuration, by its loss."""
    loss = theirs.get("loss_type", "").strip("[]'\" ")
    if trainer == "grpo" and theirs.get("importance_sampling_level") == "sequence":
        return "gspo"
    if trainer == "cpo" and loss in ("simpo", "alphapo"):
        return "simpo" if is_same(theirs.get("alpha", "0"), "0") else "alphapo"
    return loss if trainer == "grpo" and loss in ("dr_grpo", "cispo", "sapo") else trainer


def _reads_texts(query: NameQuery) -> bool:
    return query.context.recipe in TEXT_RECIPES


def _gives_sizes(query: NameQuery) -> bool:
    return any(map(query.given, ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")))


def _device_rows(query: NameQuery) -> Fraction:
    """Completions or texts of a micro-batch over all devices."""
    return query.number("per_device_train_batch_size") * query.context.ranks


def _update_rows(query: NameQuery) -> Fraction:
    """Completions or texts of an optimizer step."""
    return _device_rows(query) * query.number("gradient_accumulation_steps")


def _generated_rows(query: NameQuery) -> Fraction:
    """Completions that are generated together."""
    if query.given("generation_batch_size"):
        return query.number("generation_batch_size")
    batches = "steps_per_generation" if query.given("steps_per_generation") else "gradient_accumulation_steps"
    return _device_rows(query) * query.number(batches)


def _accumulates(query: NameQuery) -> bool:
    """True if an optimizer step has several micro-batches."""
    return _gives_sizes(query) and query.number("gradient_accumulation_steps") * query.context.ranks > 1


def _batch_prompts(query: NameQuery) -> str:
    if _reads_texts(query) or query.context.recipe == "gkd":
        return whole(_update_rows(query), "--batch_prompts")
    rows = _generated_rows(query)
    samples = query.number("num_generations")
    return whole(rows / samples, f"--batch_prompts ({rows} completions / {samples})")


def _minibatches(query: NameQuery) -> str:
    rows = _generated_rows(query)
    update_rows = _update_rows(query)
    return whole(rows / update_rows, f"--minibatches ({rows} completions / {update_rows})")


def _updates(query: NameQuery) -> Fraction:
    """Optimizer steps of one step here."""
    if _reads_texts(query) or query.context.recipe == "gkd":
        return Fraction(1)
    minibatches = _minibatches(query) if _gives_sizes(query) else query.context.ours["minibatches"]
    return query.number("num_iterations") * Fraction(minibatches)


def _steps(query: NameQuery) -> str:
    """Steps by max_steps, by the epochs over known records, or by --steps. Raises: DifferentError."""
    if query.holds("!max_steps=none,0,-1"):
        return whole(query.number("max_steps") / _updates(query), f"--steps ({_updates(query)} optimizer steps each)")
    if query.context.records is None or not query.given("num_train_epochs"):
        return str(query.context.ours["steps"])
    steps = query.context.records / Fraction(_batch_prompts(query))
    rounds = math.ceil if _reads_texts(query) else math.floor  # TRL's sampler of completions drops an incomplete batch
    return str(math.ceil(query.number("num_train_epochs") * max(rounds(steps), 1)))


# ---- losses

_PAIR_LOSSES = (
    "sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero apo_down discopop "
    "sigmoid_norm"
)


def _pair_loss(query: NameQuery) -> str:
    """The loss of `dpo` that is TRL's; "" if there are several, weights or another one."""
    names = items(query.text)
    is_known = len(names) == 1 and names[0] in _PAIR_LOSSES.split() and not query.given("loss_weights")
    return re.sub("_(pair|hard|norm)$", "", names[0]) if is_known else ""


def _is_inexact(query: NameQuery) -> bool:
    """True if TRL's loss of pairs is not that of `dpo`."""
    if query.holds("=aot,aot_unpaired"):
        return _accumulates(query) or query.holds("use_weighting?") or query.given("ld_alpha")
    return query.holds("=exo_pair") and query.number("label_smoothing") == 0


def _highest_ratio(query: NameQuery) -> Fraction:
    return 1 + query.number("epsilon_high" if query.given("epsilon_high") else "epsilon")


def _cispo_bound(query: NameQuery) -> str:
    """TRL's cispo has only the upper bound, given as a ratio."""
    bound = _highest_ratio(query) - 1
    if bound < 1:
        raise DifferentError(
            f"TRL's cispo then bounds every ratio by {number_text(bound)}, below 1; --clip_high is above"
        )
    return number_text(bound - 1)


def _reward_functions(query: NameQuery) -> str:
    names = items(query.text)
    if not all(":" in name or "." in name for name in names):
        raise DifferentError(f"{query.text} is a name inside TRL; give --reward=FILE.py:function or module:function")
    return ",".join(name if ":" in name else ":".join(name.rsplit(".", 1)) for name in names)


TRL = Library(
    title="TRL",
    rows=read_names(_TABLE),
    idle=_IDLE,
    defaults=COMMON | {"loss_type": "sigmoid", "label_smoothing": "0", "epsilon": "0.2"},
    values=COMMON_VALUES
    | {
        "accumulates": _accumulates,
        "all_updates": lambda query: Fraction(_steps(query)) * _updates(query),
        "batch": lambda query: query.filled(
            "{per_device_train_batch_size} a device x {gradient_accumulation_steps} accumulated x "
            f"{query.context.ranks} devices with rows of their own"
        ),
        "batch_prompts": _batch_prompts,
        "below_clip": lambda query: query.number("") <= _highest_ratio(query),
        "cispo_bound": _cispo_bound,
        "correction": lambda query: (
            "a correction for the gap between engine and trainer (vllm_importance_sampling_correction, on by default) "
            "is part of an algorithm: `corrected` with `importance_weights()`, docs/algorithms.md"
        ),
        "data_flag": lambda query: "data" if _reads_texts(query) else "prompts",
        "engine": lambda query: "vllm_server" if query.value("vllm_mode") == "server" else "vllm",
        "events": lambda query: max(1, round(query.number("") / _updates(query))),
        "file": lambda query: Path(query.text).exists(),
        "inexact": _is_inexact,
        "minibatches": _minibatches,
        "pair_loss": _pair_loss,
        "reward_functions": _reward_functions,
        "several_updates": lambda query: _gives_sizes(query) and Fraction(_minibatches(query)) > 1,
        "share": lambda query: 0 < query.number("") < 1,
        "steps": _steps,
        "texts": _reads_texts,
        "updates": _updates,
        "warmup": lambda query: math.ceil(query.number("") * Fraction(_steps(query)) * _updates(query)),
    },
)
