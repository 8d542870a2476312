"""The models that all backends train: sizes, arithmetic and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn


@pytest.mark.parametrize(
    "name",
    [
        "tiny",
        "gpt2",
        "2.7b",
        "13b",
        "13b-16-layers",
        "llama-tiny",
        "llama-8b",
        "llama-8b-16-layers",
    ],
)
def test_sizes_are_those_of_the_model(bench: Any, name: str) -> None:
    """6 FLOP per element of every matrix and token, and half of the attention square in forward and
    backward.
    """
    shape = bench.models.SHAPES[name]
    with torch.device("meta"):
        model = shape.model()
    assert shape.num_parameters == sum(param.numel() for param in model.parameters())
    matrices = sum(
        module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear)
    )
    # scores and their product with the values, 2 FLOP an element each, half of the square; backward
    # is twice forward
    attention = 3 * shape.layers * 2 * 2 * shape.dim * shape.seq / 2
    assert shape.flops_per_token == 6 * matrices + attention


def test_llama_3_8b(bench: Any) -> None:
    assert bench.models.SHAPES["llama-8b"].num_parameters == 8_030_261_248


NAMES = {
    "norm_attention": "input_layernorm",
    "norm_mlp": "post_attention_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def name_in_transformers(name: str) -> str:
    """`blocks.3.query.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    match name.split("."):
        case ["token", kind]:
            return f"model.embed_tokens.{kind}"
        case ["head", "norm", kind]:
            return f"model.norm.{kind}"
        case ["head", "project", kind]:
            return f"lm_head.{kind}"
        case _:
            _, number, part, kind = name.split(".")
            return f"model.layers.{number}.{NAMES[part]}.{kind}"


def test_llama_is_that_of_transformers(bench: Any) -> None:
    """The same weights give the same loss and gradients."""
    shape = bench.models.LlamaShape(2, 32, 4, 2, 48, vocab=50, seq=16)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": shape.base},
    )
    torch.manual_seed(0)
    model, theirs = shape.model(), transformers.LlamaForCausalLM(config)
    theirs.load_state_dict(
        {name_in_transformers(name): value for name, value in model.state_dict().items()},
        strict=True,
    )
    ids = torch.randint(0, 50, (2, 17))
    loss = model(ids[:, :-1], ids[:, 1:])
    expected = nn.functional.cross_entropy(
        theirs(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten()
    )
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    gradients = {name: param.grad for name, param in theirs.named_parameters()}
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad, gradients[name_in_transformers(name)])


@pytest.mark.parametrize("name", ["tiny", "llama-tiny"])
def test_initial_values(bench: Any, name: str) -> None:
    """Norms 1, biases 0, matrices with deviation 0.02; then the loss is that of guessing."""
    shape = bench.models.SHAPES[name]
    model = shape.model()
    bench.models.initialise(model)
    for path, param in model.named_parameters():
        if path.endswith("bias"):
            assert not param.any()
        elif "norm" in path:
            assert (param == 1).all()
        else:
            assert param.std().item() == pytest.approx(0.02, rel=0.05), path
    ids = torch.randint(0, shape.vocab, (2, shape.seq))
    assert model(ids, ids).item() == pytest.approx(torch.tensor(shape.vocab).log().item(), abs=0.1)
