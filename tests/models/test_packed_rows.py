"""Texts that share a row get the scores and gradients that each gets in a row of its own."""

import pytest
import torch
from tests.models import parity, small
from tests.ranks.runner import on_ranks

import bmtrain as bmt
from model_center import model as models
from model_center.layer.mask import AttentionMask

KINDS = """
GPT2 position_size=16
GPTj
OPT position_size=16
Llama
Qwen3 num_heads_kv=1
Mistral num_heads_kv=1 sliding_window=3
""".strip().splitlines()
LENGTHS = (5, 1, 7)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1)
def test_texts_of_a_row_are_as_alone(kind):
    torch.manual_seed(0)
    name, _, options = kind.partition(" ")
    model = vars(models)[name](
        small.config(name, **parity.values(options))
    ).eval()  # OPT drops out by default
    bmt.init_parameters(model)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0, 0.3)
    ids = torch.randint(61, (1, sum(LENGTHS)))
    segments = torch.arange(1, 4).repeat_interleave(torch.tensor(LENGTHS))[None]
    places = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    towards = torch.randn(1, sum(LENGTHS), 61)

    def grads():
        found = [param.grad.clone() for param in model.parameters() if param.grad is not None]
        model.zero_grad()
        return found

    mask = AttentionMask(causal=True, segments=segments)
    places = model.position_ids_of(places)
    packed = model(ids, attention_mask=mask, position_ids=places).logits
    (packed * towards).sum().backward()
    together, alone = grads(), []
    for own, weight in zip(ids.split(LENGTHS, 1), towards.split(LENGTHS, 1), strict=True):
        alone.append(model(own).logits)
        (alone[-1] * weight).sum().backward()
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)
    for one, other in zip(together, grads(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
