"""The models that all backends train: sizes, arithmetic and values."""

import torch
import transformers
from torch import nn


def test_sizes_are_those_of_the_model(bench):
    """6 FLOP per element of every matrix and token, and half of the attention square in forward and
    backward.
    """
    shapes = bench.models.SHAPES
    for name in [
        "tiny",
        "gpt2",
        "2.7b",
        "13b",
        "13b-16-layers",
        "llama-tiny",
        "llama-8b",
        "llama-8b-16-layers",
    ]:
        shape = shapes[name]
        with torch.device("meta"):
            model = shape.model()
        assert shape.num_parameters == sum(param.numel() for param in model.parameters())
        maps = [module for module in model.modules() if isinstance(module, nn.Linear)]
        # scores and their product with the values, 2 FLOP an element each, half of the square;
        # backward is twice forward
        attention = 3 * shape.layers * 2 * 2 * shape.dim * shape.seq / 2
        assert shape.flops_per_token == 6 * sum(x.weight.numel() for x in maps) + attention
    assert shapes["llama-8b"].num_parameters == 8_030_261_248


NAMES = dict(
    pair.split(":")
    for pair in [
        "norm_attention:input_layernorm",
        "norm_mlp:post_attention_layernorm",
        "query:self_attn.q_proj",
        "key:self_attn.k_proj",
        "value:self_attn.v_proj",
        "out:self_attn.o_proj",
        "gate:mlp.gate_proj",
        "up:mlp.up_proj",
        "down:mlp.down_proj",
    ]
)


def name_in_transformers(name: str):
    """`blocks.3.query.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    first, part, *rest = name.split(".")
    if first == "token":
        return f"model.embed_tokens.{part}"
    if first == "head":
        return "model.norm.weight" if part == "norm" else "lm_head.weight"
    number, part, kind = part, *rest
    return f"model.layers.{number}.{NAMES[part]}.{kind}"


def test_llama_is_that_of_transformers(bench):
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
    own = {name_in_transformers(name): value for name, value in model.state_dict().items()}
    theirs.load_state_dict(own, strict=True)
    ids = torch.randint(0, 50, (2, 17))
    loss = model(ids[:, :-1], ids[:, 1:])
    logits = theirs(ids[:, :-1]).logits.flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    gradients = {name: param.grad for name, param in theirs.named_parameters()}
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad, gradients[name_in_transformers(name)])
