"""Frozen weights in 4 bits, beside adapters that are trained, against a plain model with the same
rounded weights.
"""

import gc
from typing import Any
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

# peft calls transformers so
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6")


def rounded(weight):
    """A weight as four bits hold it."""
    how: Any = {"blocksize": BLOCK_SIZE, "quant_type": "nf4"}
    packed, state = bitsandbytes.functional.quantize_4bit(weight, **how)
    out = bitsandbytes.functional.dequantize_4bit(packed, state)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [{}, {"length_scale": True, "bias": True}, {"length_scale": True, "length_scale_before": True}],
)
def test_a_layer(dtype, options):
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


def expected(model, ids):
    """Logits and gradients of adapters, of transformers' model with rounded weights."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for name, module in plain.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.copy_(rounded(module.weight))
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapted = peft.get_peft_model(plain, peft.LoraConfig(r=4, target_modules=targets))
    trained = filled(adapted)
    logits = adapted(ids).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return logits.detach(), [grad_of(param) for param in trained]


def filled(model):
    """The adapters in the order of layers, q, k, v and out in each, with the same values in every
    model; nothing else is trained.
    """
    drawn = torch.Generator().manual_seed(2)
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    assert trained and all(".lora_" in name for name, _ in trained)
    with torch.no_grad():
        for _, param in trained:
            param.copy_(torch.randn(param.shape, generator=drawn) * 0.1)
    return [param for _, param in trained]


def memory(model):
    """Bytes of this rank's shards."""
    found = [param for param in model.parameters() if isinstance(param, bmt.DistributedParameter)]
    storages = [own_slice(param).untyped_storage() for param in found]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def trained_beside(model, ids, logits, grads):
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
    trained = filled(ours)
    found = ours(ids).logits
    torch.testing.assert_close(found.detach(), logits, rtol=1e-4, atol=1e-5)
    loss = F.cross_entropy(found[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    (loss / bmt.world_size()).backward()  # gradients of ranks are summed
    for number, (want, param) in enumerate(zip(grads, trained, strict=True)):
        models.assert_same(grad_of(param), want, f"gradient of adapter {number}")


def test_adapters_beside(tmp_path):
    model = str(tiny("llama", tmp_path))
    ids = torch.arange(3, 43).view(2, 20)
    run_ranks(trained_beside, 2, model, ids, *expected(model, ids))


@pytest.mark.long
def test_a_program(tmp_path):
    """It learns; stopped and gone on, as if it had not stopped."""
    arguments = ["--model-config", tiny("llama", tmp_path), "--max-length 64"]
    arguments += ["--data", DATA / "chat" / "train.jsonl", "--dtype bf16 --lr 1e-2 --batch-size 2"]
    arguments += ["--lr-decay-style constant --epochs 9 --lora-rank 8 --load-in-4bit --save"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    command(*arguments, whole, "--train-iters 12")
    assert losses(whole)[-1] < losses(whole)[0] - 0.3
    for last in ("--train-iters 6", "--train-iters 12 --resume"):
        command(*arguments, stopped, last)
    same_learning(stopped, whole)
    state = ShardedCheckpoint(stopped / "step-00000012").all()
    assert state and all(".lora_" in name for name in state)
    written = {path.name for path in (stopped / "adapter").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer_config.json"} <= written


def test_refusals():
    """Before anything is loaded, or changed."""
    for wrong in ("", "--lora-rank 4 --from-scratch"):
        with pytest.raises(ConfigError, match="needs pretrained weights and adapters"):
            command("--model-config nowhere --data nowhere --load-in-4bit", wrong, ranks=1)
    layer = torch.nn.Sequential(Linear(8, 8, dtype=torch.float32))
    with (
        mock.patch.dict("sys.modules", {"bitsandbytes": None}),
        pytest.raises(ConfigError, match="pip install bitsandbytes"),
    ):
        quantize(layer)
    assert type(layer[0]) is Linear
