"""Random models of transformers, to compare with, and what both sides compute."""

import torch
import transformers
from paged_rows import Rows

from funrl import trees
from funrl.models import Config, Inputs
from funrl.models.huggingface import directories as hf
from funrl.models.model import Model

SMALL = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def random_weights(peer):
    """The same module in evaluation mode with norms and biases that matter."""
    with torch.no_grad():
        for key, x in peer.named_parameters():
            added = (
                peer.config.model_type.startswith(("qwen3_next", "qwen3_5")) and "linear_attn" not in key
            )  # norms are 1 + weight
            x.normal_(1.0 if x.ndim == 1 and key.endswith("weight") and not added else 0.0, 0.1)
            if peer.config.model_type.startswith("gemma4") and key.endswith("q_norm.weight"):
                x.mul_(len(x) ** -0.5)  # its attention has no other scale
        for key, x in peer.named_buffers():
            if key.endswith(("e_score_correction_bias", "layer_scalar")):
                x.normal_(float(key.endswith("layer_scalar")), 0.1)
    return peer.eval()


def peer_of(raw, folder=None, dtype=torch.float32):
    """A random causal language model of transformers, saved to `folder`."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**SMALL | raw)
    peer = random_weights(transformers.AutoModelForCausalLM.from_config(config, dtype=dtype))
    if folder is not None:
        peer.save_pretrained(folder)
    return peer


def capped(config: Config, logits):
    return (
        logits
        if config.scales.logit_cap is None
        else config.scales.logit_cap * (logits / config.scales.logit_cap).tanh()
    )


def logits_of(model: Model, params, tokens_BT):
    hidden_BTD = model.apply(params, Inputs(tokens_BT)).hidden
    return capped(model.config, hidden_BTD @ model.unembed(params).T)


def tokens_of(config: Config, rows=3, length=40):
    return torch.randint(1, config.vocab, (rows, length), generator=torch.Generator().manual_seed(1))


def greedy(model: Model, params, tokens_BT, count):
    """The tokens and `count` more, decoded over pages."""
    rows_count, begin = tokens_BT.shape
    more_BT = torch.zeros(rows_count, count, dtype=torch.int64)
    rows = Rows(model, params, torch.cat((tokens_BT, more_BT), 1))
    with torch.no_grad():
        hidden_RD = rows.pass_of([begin] * rows_count).view(rows_count, begin, -1)[:, -1]
        for at in range(begin, begin + count):
            rows.tokens_BT[:, at] = (hidden_RD @ model.unembed(params).T).argmax(-1)
            hidden_RD = rows.pass_of([1] * rows_count)
    return rows.tokens_BT


def greedy_of(peer, tokens_BT, count):
    """The same by the peer's own `generate`."""
    with torch.no_grad():
        return peer.generate(tokens_BT, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)


def assert_peer(raw, folder, new_tokens):
    """A model has transformers' logits and greedy tokens, and the files of each are read by the other."""
    peer = peer_of(raw, folder / "theirs")
    model, params = assert_logits_and_files(peer, folder)
    begins_BS = tokens_of(model.config)[:2, :9]
    assert torch.equal(greedy(model, params, begins_BS, new_tokens), greedy_of(peer, begins_BS, new_tokens))


def assert_logits_and_files(peer, folder):
    """The model of `folder / "theirs"` and its weights: it has the peer's logits, and each reads the other's files."""
    model, params = hf.load(folder / "theirs")
    tokens_BT = tokens_of(model.config)
    with torch.no_grad():
        expected = peer(tokens_BT).logits
    assert expected.std() > 0.03
    exact = logits_of(model, trees.map(lambda x: x.double() if x.is_floating_point() else x, params), tokens_BT)
    for logits in (logits_of(model, params, tokens_BT), expected):  # each has roundings of its own
        assert (logits - exact).abs().max() < 2e-5
    hf.save(folder / "ours", model, params)
    again = transformers.AutoModelForCausalLM.from_pretrained(folder / "ours").eval()
    with torch.no_grad():
        assert torch.equal(again(tokens_BT).logits, expected)
    model_again, params_again = hf.load(folder / "ours")
    assert model_again.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(trees.leaves(params), trees.leaves(params_again), strict=True))
    return model, params
