"""Families and switches against transformers: logits of plain, padded and packed rows, greedy tokens, files."""

import pytest
import torch
import transformers
from family_configs import ALL
from hf_peers import SMALL, assert_peer, capped, peer_of, tokens_of
from safetensors.torch import load_file
from selection import quick

from funrl.batch import Batch
from funrl.models import Inputs, place
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.config import config_from_hf, config_to_hf

QUICK = ("llama gelu", "phi3 longrope", "gpt_oss", "glm4_moe", "gemma3 full", "exaone4 unused window", "qwen3_5 full")


@pytest.mark.parametrize("name", quick(ALL, QUICK))
def test_logits_greedy_tokens_and_files(name, tmp_path):
    assert_peer(ALL[name], tmp_path, new_tokens=4)
    theirs, ours = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "ours"))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(ours[key], x) for key, x in theirs.items())


@pytest.mark.parametrize("name", ALL)
def test_config_round_trip_through_transformers(name):
    config = config_from_hf(SMALL | ALL[name])
    assert config_from_hf(config_to_hf(config)) == config
    theirs = transformers.AutoConfig.for_model(**SMALL | ALL[name]).to_dict()  # every field, as transformers 5 does
    assert config_from_hf(theirs) == config


PACKED = [  # one of each kind of positions, windows, mixers and experts
    *("llama dynamic", "phi3 longrope", "olmo3", "ministral3 window", "qwen2_moe window", "gpt_oss full"),
    *("qwen3_5_moe", "gemma4 vectors"),
]


@pytest.mark.parametrize("name", quick(PACKED, ["gpt_oss full"]))
def test_padded_and_packed_rows_equal_the_peer(name, tmp_path):
    peer = peer_of(ALL[name], tmp_path)
    model, params = hf.load(tmp_path)
    tokens_BT = tokens_of(model.config)
    lengths = (13, 40, 27)
    rows = [row[:length] for row, length in zip(tokens_BT, lengths, strict=True)]
    with torch.no_grad():
        logps = [(peer(row[None]).logits[0] / 0.7).log_softmax(-1) for row in rows]
        real_BT = torch.arange(40) < torch.tensor(lengths)[:, None]
        hidden = model.apply(params, Inputs(tokens_BT, segments=real_BT.long())).hidden
        padded = (capped(model.config, hidden @ model.unembed(params).T) / 0.7).log_softmax(-1)
    for row, logp in enumerate(logps):
        assert (padded[row, : lengths[row]] - logp).abs().max() < 3e-5
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    batch = Batch(
        tokens=torch.cat(rows)[None],
        mask=None,
        positions=torch.cat([torch.arange(n) for n in lengths])[None],
        segments=torch.repeat_interleave(torch.arange(1, 4), torch.tensor(lengths))[None],
        offsets=offsets,
    )
    with torch.no_grad():
        got = place(model).token_scores(params, batch, ("logp", "entropy"), 0.7)
    for row, begin, logp in zip(rows, offsets.tolist(), logps, strict=False):
        inside = slice(begin + 1, begin + len(row))
        logp = logp[:-1]
        assert (got.logp[0, inside] - logp.gather(1, row[1:, None])[:, 0]).abs().max() < 3e-5
        assert (got.entropy[0, inside] + (logp.exp() * logp).sum(-1)).abs().max() < 3e-5
