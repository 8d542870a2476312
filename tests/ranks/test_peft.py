"""Adapters of peft on a wrapped model: only they train, only they have state, and they are those of
one process.
"""

from __future__ import annotations

import copy
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from tests.ranks import models, test_transformers
from tests.ranks.runner import run_ranks
from tests.tensors import sharded_parameter

import bmtrain as bmt
from bmtrain.optim import AdamOptimizer, OptimManager


def adapted(name: str, **options: Any) -> Any:
    """A model of transformers with adapters that already do something, on layers inside and outside
    of the list.
    """
    # peft calls transformers so
    warnings.filterwarnings("ignore", message=".*is deprecated and will be removed in v6")
    warnings.filterwarnings("ignore", message="Setting `save_embedding_layers`")
    targets = {
        "llama": ["q_proj", "v_proj", "down_proj", "embed_tokens"],
        "gpt2": ["c_attn", "c_fc"],
    }[name]
    config = peft.LoraConfig(
        r=3,
        lora_alpha=7,
        target_modules=targets,
        lora_dropout=0.0,
        fan_in_fan_out=name == "gpt2",
        **options,
    )
    model = peft.get_peft_model(test_transformers.make(name), config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(torch.randn(param.shape, generator=generator) * 0.1)
    return model.train()


def training() -> None:
    for name in ("llama", "gpt2"):
        plain = adapted(name)
        model = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
        assert isinstance(model, peft.PeftModel)
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
        test_transformers.train_both(name, plain, model)
        for param_name, param in model.named_parameters():
            assert param.requires_grad == ("lora_" in param_name) == (param.grad is not None), (
                param_name
            )
            storage = sharded_parameter(param).storage_of
            frozen = not any(other is not None and other.requires_grad for other in storage.params)
            assert frozen == ("lora_" not in param_name), (
                f"{param_name} shares a storage with trained parameters"
            )
            assert (storage.gradient.flat is None) == frozen, (
                f"{param_name} has memory for a gradient"
            )


def optimizer_states() -> None:
    for kind in (AdamOptimizer, torch.optim.AdamW):
        model = bmt.BMTrainModelWrapper(adapted("llama"))
        adapters = sum(
            param._original_shape.numel() for param in model.parameters() if param.requires_grad
        )
        optimizer = kind((param for param in model.parameters() if param.requires_grad), lr=1e-2)
        manager = OptimManager()
        manager.add_optimizer(optimizer)
        manager.backward(
            model(**test_transformers.own_rows(test_transformers.batch(model, 0))).loss
        )
        manager.step()
        for name in ("exp_avg", "exp_avg_sq"):
            own = sum(state[name].local.numel() for state in optimizer.state.values())
            total = sum(bmt.gather_result(torch.tensor([own])).tolist())
            assert total == adapters, (
                f"{kind.__name__}: {total} elements of {name} for {adapters} of the adapters"
            )


def adapter_files(folder: str) -> None:
    for name in ("llama", "gpt2"):
        path = pathlib.Path(folder, f"{name}-{bmt.world_size()}")
        plain = adapted(name)
        model = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
        state, want = peft.get_peft_model_state_dict(model), peft.get_peft_model_state_dict(plain)
        models.assert_same_dicts(state, want, f"{name}: adapters", 0.0)
        fresh = [
            peft.get_peft_model(test_transformers.make(name), plain.peft_config["default"])
            for _ in range(2)
        ]
        fresh[1] = bmt.BMTrainModelWrapper(fresh[1])
        for other in fresh:
            result: Any = peft.set_peft_model_state_dict(other, state)
            assert not result.unexpected_keys
            test_transformers.assert_same_answers(other, plain, f"{name}: adapters loaded")
        model.save_pretrained(path)
        loaded = peft.PeftModel.from_pretrained(test_transformers.make(name), path)
        test_transformers.assert_same_answers(loaded, plain, f"{name}: save_pretrained")
        bmt.save(model, path / "all.pt")
        plain.load_state_dict(torch.load(path / "all.pt"), strict=True)


def merging() -> None:
    """Into sharded weights, out of them again, and for good."""
    plain = adapted("llama")
    model = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
    with model.disable_adapter(), plain.disable_adapter():
        test_transformers.assert_same_answers(model, plain, "without adapters")
    for name in ("merge_adapter", "unmerge_adapter"):
        for each in (plain, model):
            getattr(each, name)()
        models.assert_same_dicts(model.state_dict(), plain.state_dict(), name)
        test_transformers.assert_same_answers(model, plain, name)
        assert all(
            param.requires_grad == ("lora_" in key) for key, param in model.named_parameters()
        ), f"{name}: what is trained has changed"
    test_transformers.train_both("after unmerging", plain, model)
    plain, model = plain.merge_and_unload(), model.merge_and_unload()
    models.assert_same_dicts(model.state_dict(), plain.state_dict(), "merged and unloaded")
    test_transformers.assert_same_answers(model, plain, "merged and unloaded")


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("program", [training, optimizer_states, merging])
def test_program(program: Callable[[], None], world_size: int) -> None:
    """What the function of this name states, on layers inside and outside of blocks."""
    run_ranks(program, world_size)


@pytest.mark.parametrize("world_size", [1, 2])
def test_adapter_files(world_size: int, tmp_path: pathlib.Path) -> None:
    """Full tensors out of a sharded model, and into one."""
    run_ranks(adapter_files, world_size, str(tmp_path))
