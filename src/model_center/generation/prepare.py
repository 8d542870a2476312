"""The arguments of a generation: checked, on the model's device, as the engine takes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from model_center.errors import ConfigError, InputError
from model_center.generation.config import GenerationConfig
from model_center.generation.search import DecodeTask
from model_center.generation.stopping import StopCriteria, StopStrings, texts_of_tokens
from model_center.model.base import BaseModel
from model_center.model.decoding import Decoding


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptBatch:
    """Prompts: the arguments of `generate` of these names."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None = None
    inputs: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    tokenizer: Any = None
    generator: torch.Generator | None = None


def prepared(
    model: BaseModel, prompts: PromptBatch, config: GenerationConfig
) -> tuple[Decoding, DecodeTask]:
    """The model's part of the work, and the search's.

    A rank without prompts gets a dummy prompt: it still takes part in the forward passes of the
    others.

    Raises:
        ConfigError, InputError: naming the argument, what it is, what is expected.
    """
    device = next(model.parameters()).device
    if len(prompts.input_ids):
        decoding = decoding_of(model, prompts, config, device)
    else:
        some_token = torch.zeros(1, model.shortest_prompt, dtype=torch.long, device=device)
        decoding = model.decoding(some_token, None, {})
    for name, ids in (
        ("eos_token_id", config.eos_ids),
        ("pad_token_id", (config.pad,)),
        ("forbidden_tokens", config.forbidden_tokens),
    ):
        check_known(name, torch.tensor(ids, dtype=torch.long), model)
    eos = torch.tensor(config.eos_ids, dtype=torch.long, device=device)
    task = DecodeTask(
        prefix=decoding.prefix,
        mask=decoding.mask,
        num_new=config.num_new_tokens(decoding.prefix.shape[1], model.num_positions),
        config=config,
        ending=StopCriteria(eos, stop_strings(config.stops, prompts.tokenizer, model, device)),
        generator=random_numbers(prompts.generator, config, device),
    )
    return decoding, task


def decoding_of(
    model: BaseModel, prompts: PromptBatch, config: GenerationConfig, device: torch.device
) -> Decoding:
    """The model's part of the work for these prompts, one at least."""
    ids = prompts.input_ids
    if ids.dim() != 2 or ids.is_floating_point() or ids.shape[1] < 1:
        raise InputError(
            f"input_ids is {ids.dtype} of shape {tuple(ids.shape)}: expected integers "
            "(batch, at least 1)."
        )
    check_known("input_ids", ids, model)
    mask = valid_tokens(ids, prompts.attention_mask, config)
    decoding = model.decoding(
        ids.to(device).long(),
        None if mask is None else mask.to(device),
        {name: value.to(device) for name, value in prompts.inputs.items()},
    )
    check_known("decoder_input_ids", decoding.prefix, model)
    if decoding.mask is not None and not bool(decoding.mask[:, -1].all()):
        raise InputError(
            "attention_mask is 0 at the last token of a row: pad prompts on the left, "
            "where nothing is added."
        )
    return decoding


def valid_tokens(
    ids: torch.Tensor, attention_mask: torch.Tensor | None, config: GenerationConfig
) -> torch.Tensor | None:
    """bool (rows, length), False for padding; None for none. See `attention_mask` of `generate`.

    Raises:
        InputError: for a mask of another shape, or a row without any valid token.
    """
    if attention_mask is None:
        if config.pad_token_id is None or config.pad_token_id in config.eos_ids:
            return None
        attention_mask = ids != config.pad_token_id
    if attention_mask.shape != ids.shape:
        shape = tuple(attention_mask.shape)
        raise InputError(
            f"attention_mask has shape {shape}: expected that of input_ids, {tuple(ids.shape)}."
        )
    mask = attention_mask != 0
    is_empty = (~mask).all(1)
    if bool(is_empty.any()):
        raise InputError(
            f"prompt {int(is_empty.int().argmax())} has no token: expected one at least in "
            "each row."
        )
    return None if bool(mask.all()) else mask


def check_known(name: str, ids: torch.Tensor, model: BaseModel) -> None:
    """Demand ids of the model's vocabulary.

    Raises:
        InputError: naming one that is not.
    """
    size = model.config.vocab_size
    strange = ids[(ids < 0) | (ids >= size)]
    if len(strange):
        raise InputError(
            f"{name} has the token {int(strange[0])}: expected ids from 0 to {size - 1}."
        )


def stop_strings(
    strings: tuple[str, ...], tokenizer: Any, model: BaseModel, device: torch.device
) -> StopStrings | None:
    """The automaton of stop strings, if there are any.

    Raises:
        ConfigError: without a tokenizer.
    """
    if not strings:
        return None
    if tokenizer is None:
        raise ConfigError(
            "stop_strings need the tokenizer that knows the texts of tokens: give it as tokenizer=."
        )
    return StopStrings(strings, texts_of_tokens(tokenizer, model.config.vocab_size), device)


def random_numbers(
    given: torch.Generator | None, config: GenerationConfig, device: torch.device
) -> torch.Generator | None:
    """Where random numbers come from; None for torch's own.

    Raises:
        ConfigError: if two sources are named, or one without use.
    """
    if given is not None and (config.seed is not None or not config.do_sample):
        raise ConfigError("generator is given: expected do_sample=True beside it, and no seed.")
    if config.seed is None:
        return given
    return torch.Generator(device).manual_seed(config.seed)
