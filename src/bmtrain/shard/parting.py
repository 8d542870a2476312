"""Errors on all ranks, before anything changes, if they bring different models or values."""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from bmtrain.distributed import collectives
from bmtrain.distributed.agreement import evenly_spaced
from bmtrain.distributed.ledger import Ledger
from bmtrain.errors import ParameterError, RanksDivergedError
from bmtrain.runtime import world
from bmtrain.runtime.mesh import Axis
from bmtrain.runtime.world import World

# Elements of a tensor that are compared; all of smaller ones. More would cost seconds with large
# models on the CPU.
NUM_SAMPLED = 2**16
_SEED = (
    "All ranks must have the same values: build the model with the same seed "
    "(bmtrain.init_distributed sets it) and load the same files on all ranks, or make it on the "
    "meta device and load it afterwards."
)
_COMPARISON = "a comparison of tensors"  # of exchanges between the ranks

# torch's modules that take over the parameters of the module they hold, and what to do instead.
_ITSELF = (
    "the model is sharded and its gradients are summed over the ranks already "
    "(OptimManager divides by their number): use it as it "
    "is, without that wrapper"
)
_STRANGERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": _ITSELF,
    "torch.nn.parallel.data_parallel.DataParallel": _ITSELF + ", with one process per GPU",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": _ITSELF,
}


class Sameness:
    """Whether the models of all ranks are known to be the same.

    One per run, reached by `world.service(Sameness)`.
    """

    def __init__(self, world: World) -> None:
        self._axis = world.mesh.world
        self._is_known = False
        # torch keeps the hook until it is removed: it must not keep the run alive.
        weakref.finalize(self, register_module_module_registration_hook(_refuse_strangers).remove)

    @contextlib.contextmanager
    def known(self) -> Iterator[None]:
        """What is sharded inside needs no comparison.

        It has been compared, or will get the same values everywhere.
        """
        before, self._is_known = self._is_known, True
        try:
            yield
        finally:
            self._is_known = before

    def check(self, params: Iterable[tuple[str, torch.Tensor]]) -> None:
        """RanksDivergedError on all ranks unless names, shapes, dtypes and values are the same.

        Collective. Values are compared by a checksum, for tensors above 65536 elements of a sample:
        it finds another seed or another file, not one element.
        """
        if not self._is_known and self._axis.size > 1:
            check_same(
                "the parameters to be sharded differ between the ranks",
                [*params],
                self._axis,
                _SEED,
            )


def watch_calls(model: torch.nn.Module) -> None:
    """Compare the ledgers at every call of `model`.

    A rank whose last call gathered nothing would otherwise not notice that others have gathered.
    """
    if note_call not in model._forward_pre_hooks.values():
        torch.nn.Module.register_forward_pre_hook(model, note_call)  # a scripted module has none


def note_call(model: torch.nn.Module, args: Any) -> None:
    """The hook of `watch_calls`; in compiled code it does nothing."""
    if not torch.compiler.is_compiling() and world.is_initialized():
        current = world.current()
        what = f"a call of {model.__class__.__name__}"
        ledger = current.service(Ledger)
        ledger.enter(current.mesh.world, what, compares=ledger.is_immediate)


def check_same_state(state: Mapping[str, Any], names: Collection[str]) -> None:
    """RanksDivergedError on all ranks unless entries `names` of a state dict are the same.

    Collective. Call it on all ranks before anything of `state` is copied into the model: ranks that
    load different files would hold slices of different models. Without names nothing is compared.
    """
    if names and world.is_initialized() and world.world_size() > 1:
        axis = world.current().mesh.world
        found = [(name, state[name]) for name in names if name in state]
        check_same(
            "load_state_dict got states that differ between the ranks",
            found,
            axis,
            "Load the same file on all ranks.",
        )


def check_same(what: str, entries: Sequence[tuple[str, Any]], axis: Axis, cure: str) -> None:
    """RanksDivergedError on all ranks unless all have the same names and values, in the same order.

    Collective.
    """
    own = [f"{name}: {_described(value)}" for name, value in entries]
    digests = collectives.gather_objects(zlib.crc32("\n".join(own).encode()), axis, _COMPARISON)
    if len(set(digests)) == 1:
        return
    told: list[list[str]] = collectives.gather_objects(own, axis, _COMPARISON)
    place = next(
        i
        for i in range(max(map(len, told)))
        if len({texts[i] if i < len(texts) else "" for texts in told}) > 1
    )
    shown: dict[str, list[str]] = {}
    for rank, texts in zip(axis.ranks, told, strict=True):
        shown.setdefault(texts[place] if place < len(texts) else "no more", []).append(str(rank))
    deeds = "; ".join(f"on rank {', '.join(ranks)} {text}" for text, ranks in shown.items())
    raise RanksDivergedError(
        f"{what}. The first difference is number {place}: {deeds}. Nothing was changed. {cure}"
    )


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor) or isinstance(
        value, torch.nn.parameter.UninitializedParameter
    ):
        return type(value).__name__
    frozen = ", frozen" if isinstance(value, torch.nn.Parameter) and not value.requires_grad else ""
    gradient = (
        "" if not value.is_leaf or value.grad is None else f", gradient {_checksum(value.grad)}"
    )
    return f"shape {tuple(value.shape)}, {value.dtype}, values {_checksum(value)}{gradient}{frozen}"


def _checksum(x: torch.Tensor) -> str:
    """Checksum of the bits of evenly spaced elements, or a note that there are no values."""
    x = x.detach()
    if x.is_meta or type(x) is not torch.Tensor or x.layout is not torch.strided or x.is_quantized:
        return f"of a {type(x).__name__} on {x.device.type}"
    sample = evenly_spaced(x, NUM_SAMPLED).cpu().contiguous()
    return (
        f"{zlib.crc32(sample.view(torch.uint8).numpy().tobytes()):08x}"
        if sample.numel()
        else "none"
    )


def _refuse_strangers(holder: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    """ParameterError if a sharded module is given to one that would treat it as whole.

    These modules broadcast, shard or trace the parameters.
    """
    for kind in type(holder).__mro__:
        cure = _STRANGERS.get(f"{kind.__module__}.{kind.__qualname__}")
        if (
            cure is not None
            and module is not None
            and any(getattr(x, "storage_of", None) is not None for x in module.parameters())
        ):
            raise ParameterError(f"{kind.__name__} cannot hold a sharded model: {cure}.")
