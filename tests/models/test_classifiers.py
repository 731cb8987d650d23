"""Reward models of transformers, of whole texts and of steps, in every family: their numbers, to 2e-5 in float32."""

import pytest
import torch
import transformers
from family_configs import DELTA_NETS
from hf_peers import SMALL, random_weights, tokens_of
from test_expert_families import DEEPSEEK
from test_qwen3_next import NEXT

from funrl.batch import Batch
from funrl.models import ModelError, place
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.configs.hf_family import class_name
from funrl.models.huggingface.families import FAMILIES

FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
RAW = {name: {"model_type": name} for name in FAMILIES} | {
    "qwen3": {"model_type": "qwen3", "head_dim": 20},
    "gemma2": {"model_type": "gemma2", "head_dim": 8, "sliding_window": 7, "attn_logit_softcapping": 0.7},
    "gemma3_text": {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 7},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 16, **FEW_EXPERTS},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "deepseek_v2": DEEPSEEK | {"model_type": "deepseek_v2"},
    "deepseek_v3": DEEPSEEK,
    "qwen3_next": NEXT,
    "qwen3_5_text": DELTA_NETS["qwen3_5"],
}
MODULES = {
    "gpt2": {"model_type": "gpt2"},
    "opt": {"model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 48},
    "falcon": {"model_type": "falcon"},
}
TEXT_FAMILIES = [name for name, family in FAMILIES.items() if family.vision is None]
SEQUENCES = [name for name in TEXT_FAMILIES if class_name(name, "SEQUENCE_CLASSIFICATION")]
TOKENS = [name for name in TEXT_FAMILIES if class_name(name, "TOKEN_CLASSIFICATION")]
OF_STEPS = ("llama", "qwen3", "gemma2", "qwen3_moe")  # one of each kind: the others differ by what is below the head


def saved(auto, raw, labels, folder):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**SMALL | raw, num_labels=labels)
    peer = random_weights(auto.from_config(config))
    peer.save_pretrained(folder)
    return peer


def values_of(folder, tokens_BT, code):
    """[B, T] a number behind each token: one more token reads the state at the end."""
    model, params = hf.load(folder, model=hf.check_directory(folder, code))
    longer_BT = torch.cat([tokens_BT, tokens_BT[:, :1]], 1)
    values = [place(model).values(params, Batch(tokens=row[None], mask=None))[0, 1:] for row in longer_BT]
    return torch.stack(values)


@pytest.mark.parametrize("name", [*SEQUENCES, *MODULES])
def test_a_sequence_classifier_scores_the_whole_text(name, tmp_path):
    auto = transformers.AutoModelForSequenceClassification
    peer = saved(auto, (RAW | MODULES)[name], 1, tmp_path)
    tokens_BT = tokens_of(hf.load_model(tmp_path, "auto").config, 2, 20)
    with torch.no_grad():
        expected_B = peer(tokens_BT).logits[:, 0]
    got_B = values_of(tmp_path, tokens_BT, "hf" if name in MODULES else "native")[:, -1]
    assert expected_B.std() > 0.01 and (got_B - expected_B).abs().max() < 2e-5


@pytest.mark.parametrize("name", [name for name in TOKENS if name in OF_STEPS])
def test_a_token_classifier_scores_the_steps(name, tmp_path):
    peer = saved(transformers.AutoModelForTokenClassification, RAW[name], 2, tmp_path)
    tokens_BT = tokens_of(hf.load_model(tmp_path).config, 2, 20)
    with torch.no_grad():
        wrong_BT, right_BT = peer(tokens_BT).logits.unbind(-1)
    got_BT = values_of(tmp_path, tokens_BT, "native")
    assert (right_BT - wrong_BT).std() > 0.1 and (got_BT - (right_BT - wrong_BT)).abs().max() < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "deberta-v2"])
def test_a_classifier_that_reads_both_ways_is_refused(name, tmp_path):
    saved(transformers.AutoModelForSequenceClassification, {"model_type": name}, 1, tmp_path)
    with pytest.raises(ModelError, match="ForSequenceClassification: only a classifier on a causal language model"):
        hf.check_directory(tmp_path, "auto")
