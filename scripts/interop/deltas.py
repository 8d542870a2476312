"""OpenDelta's deltas on sharded models, in every order, and with its own backend for BMTrain."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from typing import Any

import opendelta
import torch
import torch.nn.functional as F
from scripts.interop import backbones
from scripts.interop.comparing import Batch, Case, Program, Side

ROWS, LENGTH, STEPS, VOCAB = 4, 6, 3, 40

TYPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "lora": (opendelta.LoraModel, {"lora_r": 2}),
    "adapter": (opendelta.AdapterModel, {"bottleneck_dim": 4}),
    "low_rank_adapter": (opendelta.LowRankAdapterModel, {"reduction_factor": 4}),
    "compacter": (
        opendelta.CompacterModel,
        {"reduction_factor": 4, "hypercomplex_division": 2, "phm_init_range": 0.3},
    ),
    "bitfit": (opendelta.BitFitModel, {}),
    "prefix": (opendelta.PrefixModel, {"prefix_token_num": 3, "embed_dim": 8, "mid_dim": 8}),
    "prefix_direct": (opendelta.PrefixModel, {"prefix_token_num": 3, "reparameterize": False}),
    "soft_prompt": (opendelta.SoftPromptModel, {"soft_token_num": 3}),
    "soft_prompt_random": (opendelta.SoftPromptModel, {"soft_token_num": 3, "token_init": False}),
    "parallel_adapter": (opendelta.ParallelAdapterModel, {"bottleneck_dim": 4}),
}
OF_BMTRAIN = ("lora", "adapter", "low_rank_adapter", "compacter", "parallel_adapter")


def batches(name: str) -> list[Batch]:
    """Tokens, a mask with padding and targets."""
    made = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens, targets = torch.randint(2, VOCAB, (2, ROWS, LENGTH), generator=generator)
        mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
        mask[1, -2:] = 0
        batch = {"input_ids": tokens, "attention_mask": mask, "targets": targets}
        if name == "t5":
            batch["decoder_input_ids"] = torch.randint(
                2, VOCAB, (ROWS, LENGTH), generator=generator
            )
        made.append(batch)
    return made


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    """A mean over all positions but those of a soft prompt."""
    batch = dict(batch)
    targets = batch.pop("targets")
    logits = model(**batch).logits[:, -LENGTH:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def insert(side: Side, model: Any, kind: str, backend: str = "hf") -> Any:
    """The delta in the model."""
    made, arguments = TYPES[kind]
    if backend == "bmt" and side.sharded:
        arguments = {**arguments, "backend": "bmt"}
    return made(model, **arguments)


def freeze(delta: Any) -> None:
    """All but the delta, as the tutorials do."""
    delta.freeze_module(exclude=["deltas"], set_state_dict=True)


def insert_freeze_wrap(side: Side, model: Any, kind: str) -> Any:
    freeze(insert(side, model, kind))
    return side.wrap(model)


def insert_wrap_freeze(side: Side, model: Any, kind: str) -> Any:
    delta = insert(side, model, kind)
    model = side.wrap(model)
    freeze(delta)
    return model


def wrap_insert_freeze_wrap(side: Side, model: Any, kind: str) -> Any:
    model = side.wrap(model)
    freeze(insert(side, model, kind))
    return side.wrap(model)


def wrap_insert_wrap_freeze(side: Side, model: Any, kind: str) -> Any:
    model = side.wrap(model)
    delta = insert(side, model, kind)
    model = side.wrap(model)
    freeze(delta)
    return model


def wrap_insert_freeze(side: Side, model: Any, kind: str) -> Any:
    model = side.wrap(model)
    freeze(insert(side, model, kind))
    return model


def tutorial(side: Side, model: Any, kind: str) -> Any:
    """OpenDelta's page about BMTrain: a sharded model, and deltas that shard themselves."""
    model = side.wrap(model)
    delta = insert(side, model, kind, backend="bmt")
    freeze(delta)
    delta.log(visualization=False)
    return model


def logged(side: Side, model: Any, kind: str) -> Any:
    """The table of the model, before and after it is sharded, and the ratio that it prints."""
    delta = insert(side, model, kind)
    freeze(delta)
    delta.log()
    before = dict(delta.stat)
    model = side.wrap(model)
    delta.log()
    assert before == delta.stat, (before, delta.stat)
    return model


def taken_off(side: Side, name: str, kind: str) -> Program:
    """Trained, and detached from the sharded model, which then answers without it.

    OpenDelta 0.3.2 cannot attach what it has inserted: it looks for names of an older version.
    """
    model = backbones.model(name, VOCAB)
    delta = insert(side, model, kind)
    freeze(delta)
    model = side.wrap(model)

    def answer(batch: Batch) -> torch.Tensor:
        delta.detach()
        del batch["targets"]
        logits: torch.Tensor = model(**batch).logits
        return logits

    return Program(model, functools.partial(loss_of, model), batches(name), answer)


def saved_and_read(side: Side, model: Any, kind: str) -> Any:
    """`save_finetuned` of a sharded model and `from_finetuned` into another."""
    delta = insert(side, model, kind)
    freeze(delta)
    model = side.wrap(model)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(0.1)
    with tempfile.TemporaryDirectory() as folder:
        delta.save_finetuned(folder)
        torch.manual_seed(7)
        other = backbones.model("bert", VOCAB)
        again = type(delta).from_finetuned(folder, other)
        freeze(again)
    return side.wrap(other).train()


def state_of_deltas(side: Side, model: Any, kind: str) -> Any:
    """`set_active_state_dict` on a sharded model: its state is that of what trains."""
    delta = insert(side, model, kind)
    model = side.wrap(model)
    delta.freeze_module(exclude=["deltas"], set_state_dict=False)
    delta.set_active_state_dict(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert list(state) == [n for n, p in model.named_parameters() if p.requires_grad], list(state)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.mul_(2)
    model.load_state_dict(state, strict=False)
    return model


Order = Callable[[Side, Any, str], Any]
ORDERS: list[Order] = [
    insert_freeze_wrap,
    insert_wrap_freeze,
    wrap_insert_freeze_wrap,
    wrap_insert_wrap_freeze,
    wrap_insert_freeze,
]
OTHERS: list[Order] = [logged, saved_and_read, state_of_deltas]


def build(name: str, kind: str, order: Order, side: Side) -> Program:
    """One combination."""
    model = order(side, backbones.model(name, VOCAB), kind)
    return Program(model, functools.partial(loss_of, model), batches(name))


def case(name: str, kind: str, order: Order) -> Case:
    return Case(
        f"opendelta {kind} {name} {order.__name__}", functools.partial(build, name, kind, order)
    )


CASES = [
    *(case(n, kind, order) for n in backbones.NAMES for kind in TYPES for order in ORDERS),
    *(case(n, kind, tutorial) for n in backbones.NAMES for kind in OF_BMTRAIN),
    *(case("bert", kind, order) for kind in TYPES for order in OTHERS),
    *(
        Case(
            f"opendelta {kind} bert taken_off",
            functools.partial(lambda kind, side: taken_off(side, "bert", kind), kind),
        )
        for kind in TYPES
    ),
]
