"""Frozen weights in 4 bits, beside adapters that are trained, against a plain model with the same
rounded weights.
"""

from __future__ import annotations

import gc
import pathlib
from unittest import mock

import bitsandbytes
import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from tests.ranks import models
from tests.ranks.runner import run_ranks
from tests.tensors import grad_of, own_slice
from tests.training.lm_programs import DATA, command, losses, same_learning, tiny

import bmtrain as bmt
from bmtrain.checkpoint.shards import ShardedCheckpoint
from model_center.errors import ConfigError
from model_center.layer.linear import Linear
from model_center.layer.quantized import BLOCK_SIZE, QuantizedLinear
from model_center.model import Llama
from model_center.training.adapters import ATTENTION, Lora
from model_center.training.quantization import quantize


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """A weight as four bits hold it."""
    packed, state = bitsandbytes.functional.quantize_4bit(
        weight, blocksize=BLOCK_SIZE, quant_type="nf4"
    )
    out: torch.Tensor = bitsandbytes.functional.dequantize_4bit(packed, state)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True},
        {"length_scale": True, "bias": True},
        {"length_scale": True, "length_scale_before": True},
    ],
)
def test_a_layer(dtype: torch.dtype, options: dict[str, bool]) -> None:
    """Products and the gradient of the input; the weight takes 4 bits and the scales."""
    torch.manual_seed(0)
    plain = Linear(24, 40, dtype=dtype, **options)
    for param in plain.parameters():
        torch.nn.init.normal_(param)
    layer = QuantizedLinear(plain)
    with torch.no_grad():
        plain.weight.copy_(rounded(plain.weight))
    x = torch.randn(3, 5, 24, dtype=dtype, requires_grad=True)
    for row in (x, x[:1, :1]):  # a single one has a kernel of its own
        grads = [torch.autograd.grad(m(row).square().sum(), x)[0] for m in (layer, plain)]
        torch.testing.assert_close(layer(row), plain(row))
        torch.testing.assert_close(*grads)
        with torch.no_grad():
            torch.testing.assert_close(layer(row), plain(row))
    assert not any(param.requires_grad for param in layer.parameters())
    assert layer.weight.dtype == torch.uint8 and layer.weight.numel() == 24 * 40 / 2
    assert layer.scales.numel() == 24 * 40 / BLOCK_SIZE


def expected(model: str, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and gradients of adapters, of transformers' model with rounded weights."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for name, module in plain.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.copy_(rounded(module.weight))
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapted = peft.get_peft_model(plain, peft.LoraConfig(r=4, target_modules=targets))
    fill(adapted)
    logits = adapted(ids).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    grads = {
        name: grad_of(param) for name, param in adapted.named_parameters() if param.requires_grad
    }
    return logits.detach(), grads


def fill(model: torch.nn.Module) -> None:
    """Values of adapters, the same ones for every model with as many."""
    drawn = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, param in adapters(model):
            param.copy_(torch.randn(param.shape, generator=drawn) * 0.1)


def adapters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """In the order of layers, q, k, v and out in each, as they come in the model."""
    return [(name, param) for name, param in model.named_parameters() if ".lora_" in name]


def memory(model: torch.nn.Module) -> int:
    """Bytes of this rank's shards."""
    shards = {
        own_slice(param).untyped_storage().data_ptr(): own_slice(param).untyped_storage().nbytes()
        for param in model.parameters()
        if isinstance(param, bmt.DistributedParameter)
    }
    return sum(shards.values())


def trained_beside(
    model: str, ids: torch.Tensor, logits: torch.Tensor, grads: dict[str, torch.Tensor]
) -> None:
    """On a rank: the same logits and gradients, in less memory."""
    ours = Llama.from_pretrained(model, dtype=torch.float32)
    before = memory(ours)
    quantize(ours)
    gc.collect()
    layers = [module for module in ours.modules() if isinstance(module, QuantizedLinear)]
    gone = 4 * sum(layer.dim_in * layer.dim_out for layer in layers)
    scales = 4 * sum(layer.scales.numel() for layer in layers)
    slack = 128 * len(list(ours.modules()))  # of shards that are rounded up
    assert memory(ours) < before + (scales - gone) / bmt.world_size() + slack < 0.7 * before
    Lora(ours, 4, 8, 0.0, ATTENTION, model)
    fill(ours)
    found = ours(ids).logits
    torch.testing.assert_close(found.detach(), logits, rtol=1e-4, atol=1e-5)
    loss = F.cross_entropy(found[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    (loss / bmt.world_size()).backward()  # gradients of ranks are summed
    trained = [(name, param) for name, param in ours.named_parameters() if param.requires_grad]
    assert [name for name, _ in trained] == [name for name, _ in adapters(ours)]
    for (name, want), (_, param) in zip(grads.items(), trained, strict=True):
        models.assert_same(grad_of(param), want, f"gradient of {name}")


# peft calls transformers so
@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6")
@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_beside(ranks: int, tmp_path: pathlib.Path) -> None:
    model = tiny("llama", tmp_path)
    ids = torch.arange(3, 43).view(2, 20)
    run_ranks(trained_beside, ranks, str(model), ids, *expected(str(model), ids))


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6")
def test_a_program(tmp_path: pathlib.Path) -> None:
    """It learns; stopped and gone on, as if it had not stopped."""
    arguments: list[object] = ["--model-config", tiny("llama", tmp_path), "--max-length 64"]
    arguments += ["--data", DATA / "chat" / "train.jsonl", "--dtype bf16 --lr 1e-2 --batch-size 2"]
    arguments += ["--lr-decay-style constant --epochs 9 --lora-rank 8 --load-in-4bit --save"]
    command(*arguments, tmp_path / "whole", "--train-iters 12")
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0] - 0.3
    for last in ("--train-iters 6", "--train-iters 12 --resume"):
        command(*arguments, tmp_path / "stopped", last)
    same_learning(tmp_path / "stopped", tmp_path / "whole")
    state = ShardedCheckpoint(tmp_path / "stopped" / "step-00000012").all()
    assert state and all(".lora_" in name for name in state)
    written = {path.name for path in (tmp_path / "stopped" / "adapter").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer_config.json"} <= written


def test_refusals(tmp_path: pathlib.Path) -> None:
    """Before anything is loaded, or changed."""
    arguments = ["--model-config nowhere --data nowhere", "--load-in-4bit"]
    for wrong in ("", "--lora-rank 4 --from-scratch"):
        with pytest.raises(ConfigError, match="for pretrained weights beside adapters"):
            command(*arguments, wrong, ranks=1)
    layer = torch.nn.Sequential(Linear(8, 8, dtype=torch.float32))
    with (
        mock.patch.dict("sys.modules", {"bitsandbytes": None}),
        pytest.raises(ConfigError, match="pip install bitsandbytes"),
    ):
        quantize(layer)
    assert type(layer[0]) is Linear
