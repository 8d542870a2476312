"""Layers one after another, sharded where there is a process group, and what they return."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

import bmtrain as bmt
from model_center.layer.cache import KeyValueCache, KeyValues

Pasts = KeyValueCache | list[KeyValues | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingPolicy:
    """How the layers of a stack are sharded; without a process group it does nothing.

    Attributes:
        use_checkpoint: recompute each layer in the backward pass in place of keeping its
            activations.
        zero_level: 2 or 3 as in `bmtrain.Block`; None for the default given to `init_distributed`.
    """

    use_checkpoint: bool = True
    zero_level: int | None = None


class StackOutput(NamedTuple):
    """What an Encoder or Decoder returns with `return_dict=True`.

    Attributes:
        last_hidden_state: (batch, seq, dim_model), after the last norm.
        past_key_values: the cache, where asked for: that which was given, or a list of (keys,
            values), each (batch, heads, tokens, dim_head), of all layers.
        hidden_states: the inputs of all layers and the last hidden state, where asked for. With
            norms that follow each part, which here open the layer above, the inputs are those after
            that norm.
        attentions: of each layer the probabilities (batch, heads, queries, keys), where asked for.
        cross_attentions: those of the cross-attention.
    """

    last_hidden_state: torch.Tensor
    past_key_values: Pasts | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None
    cross_attentions: tuple[torch.Tensor, ...] | None = None


def layer_list(
    layers: Iterable[torch.nn.Module], policy: ShardingPolicy
) -> bmt.TransformerBlockList | torch.nn.ModuleList:
    """The layers, each a `bmtrain.Block` in a process group."""
    if not bmt.is_initialized():
        return torch.nn.ModuleList(layers)
    return bmt.TransformerBlockList(
        bmt.Block(layer, use_checkpoint=policy.use_checkpoint, zero_level=policy.zero_level)
        for layer in layers
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerOutputs:
    """What a forward pass returns beside the last hidden states.

    Attributes:
        cache: extended by this pass and returned; None for none.
        pairs: whether to return the cache as a list of (keys, values).
        hidden_states, attentions: see StackOutput.
        normed: whether hidden states are those after the first norm of the layer that they enter.
    """

    cache: KeyValueCache | None = None
    pairs: bool = False
    hidden_states: bool = False
    attentions: bool = False
    normed: bool = False

    @property
    def past_length(self) -> int:
        """Tokens in the cache."""
        return 0 if self.cache is None else self.cache.length


def run_layers(
    layers: Iterable[torch.nn.Module],
    norm: torch.nn.Module,
    hidden: torch.Tensor,
    args: tuple[Any, ...],
    wanted: LayerOutputs,
) -> StackOutput:
    """Run all layers on `hidden` (batch, seq, dim_model), each with `args`, and the last norm."""
    entered: list[torch.Tensor] = []
    probabilities: list[tuple[torch.Tensor | None, ...]] = []
    cache = wanted.cache
    extras = {"output_attentions": True} if wanted.attentions else {}
    if wanted.normed and wanted.hidden_states:
        extras["output_normed"] = True
    for index, layer in enumerate(layers):
        entered.append(hidden)
        of_cache = {} if cache is None else {"use_cache": True, "past_key_value": cache[index]}
        out = layer(hidden, *args, **of_cache, **extras)
        if "output_normed" in extras:
            *out, entered[-1] = out
        hidden, *more = out if isinstance(out, (tuple, list)) else (out,)
        probabilities.append(tuple(more if cache is None else more[1:]))
    hidden = norm(hidden)
    return StackOutput(
        hidden,
        cache.pairs if cache is not None and wanted.pairs else cache,
        (*entered, hidden) if wanted.hidden_states else None,
        _of_all(probabilities, 0, wanted),
        _of_all(probabilities, 1, wanted),
    )


def _of_all(
    probabilities: list[tuple[torch.Tensor | None, ...]], place: int, wanted: LayerOutputs
) -> tuple[torch.Tensor, ...] | None:
    found = tuple(
        x for of_layer in probabilities for x in of_layer[place : place + 1] if x is not None
    )
    return found if wanted.attentions and found else None
