"""Small jobs to estimate, and configurations of models that have no weights."""

import dataclasses
import json

from funrl.algos.recipes import recipe
from funrl.cost import dry_run
from funrl.cost.tracing.hardware import HARDWARE
from funrl.models import decoder_model, with_fields, with_value_head
from funrl.models.lora import with_lora
from funrl.trainer.settings.settings import settings_of

H100, CPU = HARDWARE["h100"], HARDWARE["cpu"]
SIZES = {"embed": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head": 8, "mlp": 96, "vocab": 300}
LLAMA_70B = {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "max_position_embeddings": 40960,
}

QWEN3_30B = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
}


def settings(**given):
    chosen = {"batch_prompts": 8, "samples_per_prompt": 2, "max_new_tokens": 24, "token_budget": 256, "minibatches": 1}
    return settings_of(**chosen | given)


def plain(algorithm="ppo", memory=CPU.memory, arguments=None, **given):
    """The job of flags; `algorithm` is a recipe's name and `arguments` are the recipe's."""
    return dry_run.plain_job(settings(**given), recipe(algorithm)(**arguments or {}), memory)


def small(algorithm="ppo", arguments=None, sizes=None, **given):
    """The same with models of tiny sizes, but for those that have a directory of their own."""
    job = plain(algorithm, arguments=arguments, **given)
    model = decoder_model(with_fields(job.model.config, **SIZES | (sizes or {})))
    valued = with_value_head(model)
    own = {name: valued if item.unembed is None else model for name, item in job.models.items()}
    own |= {
        n: with_lora(own[n], element.adapters.lora) for n, element in job.models.items() if element.adapters is not None
    }
    return dataclasses.replace(job, model=model, models=own | {name: job.models[name] for name in job.directories})


def write_config(folder, **changes):
    raw = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 128,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    path = folder / "config.json"
    path.write_text(json.dumps(raw | changes))
    return str(path)
