"""TransformerBlockList: blocks that run one after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from bmtrain.block.block import Block
from bmtrain.errors import ConfigurationError
from bmtrain.recompute.level import Level
from bmtrain.runtime import world
from bmtrain.shard.engine import Engine


class BlockList(torch.nn.Module):
    """A module that holds blocks in order, named by their index."""

    def __init__(self, blocks: Iterable[Block], num_hidden: int) -> None:
        super().__init__()
        self.num_hidden = num_hidden
        for index, block in enumerate(blocks):
            self.add_module(str(index), block)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return (block for block in self._modules.values() if block is not None)

    def __getitem__(self, index: int | slice) -> Any:
        return list(self)[index]


class TransformerBlockList(BlockList):
    """`x = blocks(x, *rest)`: chains the blocks through the first `num_hidden` arguments.

    Every block gets all other arguments unchanged.

    Args:
        modules: blocks or plain modules, which are wrapped; a module listed twice shares its
            weights.
        num_hidden: number of leading arguments that each block replaces by its result (a tensor for
            1, else a tuple).
        sqrt: of BMTrain 0.1 and 0.2, without effect: how much is recomputed says `use_checkpoint`.
        use_checkpoint: for the Blocks made of plain modules.

    Raises:
        ConfigurationError: for an empty or wrong `modules`, or a call with too few arguments.
    """

    def __init__(
        self,
        modules: Iterable[torch.nn.Module],
        num_hidden: int = 1,
        sqrt: bool = False,
        *,
        use_checkpoint: bool | str | Level = True,
    ) -> None:
        blocks = wrap_all(modules, num_hidden, use_checkpoint)
        super().__init__(blocks, num_hidden)
        plan_gathers(blocks)

    def forward(self, *args: Any, return_hidden_states: bool = False, **kwargs: Any) -> Any:
        """Run all blocks, each on the result of the one before.

        Args:
            args: the hidden tensors, `num_hidden` of them, then other arguments of every block.
            return_hidden_states: whether to return the input of every block too.
            kwargs: keyword arguments of every block.

        Returns the hidden tensor, or a tuple of `num_hidden`. With `return_hidden_states`,
        additionally one stacked tensor `(len(self), *shape)` per hidden: the input of every block.

        Raises:
            ConfigurationError: for fewer than `num_hidden` arguments, or a block that returns
                another number of values.
        """
        count = self.num_hidden
        if len(args) < count:
            raise ConfigurationError(
                f"the block list got {len(args)} positional arguments: expected at least "
                f"num_hidden={count}."
            )
        hidden, rest = tuple(args[:count]), args[count:]
        inputs: list[tuple[Any, ...]] = []
        for block in self:
            if return_hidden_states:  # else the list would keep activations that blocks drop
                inputs.append(hidden)
            hidden = run_block(block, hidden, rest, kwargs)
        result = hidden
        if return_hidden_states:
            result += tuple(torch.stack([step[place] for step in inputs]) for place in range(count))
        return result[0] if len(result) == 1 else result


def run_block(
    block: torch.nn.Module, hidden: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """The values that `block` returns for `hidden`, as a tuple.

    Raises:
        ConfigurationError: if their number differs from that of `hidden`.
    """
    out = block(*hidden, *args, **kwargs)
    following = tuple(out) if isinstance(out, tuple | list) else (out,)
    if len(following) != len(hidden):
        raise ConfigurationError(
            f"a block returned {len(following)} values: expected num_hidden={len(hidden)} of them."
        )
    return following


def wrap_all(
    modules: Iterable[torch.nn.Module], num_hidden: int, use_checkpoint: bool | str | Level
) -> list[Block]:
    """Wrap the modules as Blocks; a module listed twice gives one Block."""
    if num_hidden < 1:
        raise ConfigurationError(f"num_hidden is {num_hidden}: expected at least 1.")
    wrapped: dict[int, Block] = {}
    blocks = []
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            raise ConfigurationError(
                f"the block list got {type(module).__name__}: expected torch.nn.Modules."
            )
        if not isinstance(module, Block) and id(module) not in wrapped:
            wrapped[id(module)] = Block(module, use_checkpoint=use_checkpoint)
        blocks.append(module if isinstance(module, Block) else wrapped[id(module)])
    return blocks


def plan_gathers(blocks: Iterable[Block]) -> None:
    """Give the schedule the order of these blocks, so that the first pass prefetches too."""
    engine = world.current("TransformerBlockList").service(Engine)
    engine.schedule.plan([storage.residence for block in blocks for storage in block.storages])
