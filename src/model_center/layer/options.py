"""ModelCenter's arguments of a transformer layer as one value, handed down to its parts,
and where models depart from what these describe.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bmtrain.runtime.arguments import unknown
from model_center.config.rules import check_fields
from model_center.errors import ArgumentError
from model_center.layer.layernorm import LayerNorm
from model_center.layer.linear import Linear
from model_center.layer.stack import ShardingPolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerVariant:
    """What no argument of ModelCenter says.

    Attributes:
        out_bias: whether `attention_out` has a bias; None for as the other maps.
        head_norm_eps: eps of an RMS norm of every head's queries and keys, before rotary positions
            (Qwen3); None for no norm.
        norms_input: whether the first layer normalises what enters it; OPT-350m has its norms
            behind each part, and none behind its embeddings.
    """

    out_bias: bool | None = None
    head_norm_eps: float | None = None
    norms_input: bool = True

    def of_layer(self, place: int) -> LayerVariant:
        """The variant of the layer at this place of a stack."""
        return self if place == 0 else dataclasses.replace(self, norms_input=True)


PLAIN = LayerVariant()


# Runs of arguments that constructors have in common, in ModelCenter's order.
DTYPE = "dtype int8"
NORM = "norm_init_var norm_bias norm_eps"
ATTENTION = "att_init_mean att_init_std att_bias att_mask_value"
FFN = "ffn_init_mean ffn_init_std ffn_bias ffn_activate_fn"
SCALES = "length_scale attn_scale dropout_p"
SPARSE = "sparse_attention attention_window"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Arguments of `Attention`.

    Attributes:
        dim_in: width of the input.
        dim_head: width of each head.
        num_heads: heads of queries.
        dim_out: width of the output; None for `dim_in`.
        dtype: of parameters and computation.
        int8: accepted; it does nothing, as in ModelCenter.
        init_mean: mean of the first weights.
        init_std: their standard deviation.
        bias: whether the linear maps have one.
        mask_value: accepted; hidden keys always have the weight 0.
        pos_bias_type: "none", "relative" (a bias added to scores) or "rotary".
        length_scale: divide products by the square root of their length, as in `Linear`.
        attn_scale: divide scores by sqrt(dim_head).
        dropout_p: probability of dropout of the attention probabilities.
        num_heads_kv: heads of keys and values, each shared by num_heads / num_heads_kv query heads;
            -1 for num_heads.
        variant: settings of newer models, which ModelCenter does not have.
        attention_window: tokens that each token sees around it, in Longformer's attention.

    Raises:
        ConfigError: naming the value.
    """

    dim_in: int
    dim_head: int
    num_heads: int
    dim_out: int | None = None
    dtype: torch.dtype = torch.half
    int8: bool = False
    init_mean: float = 0.0
    init_std: float = 0.02
    bias: bool = False
    mask_value: float = -math.inf
    pos_bias_type: str = "none"
    length_scale: bool = False
    attn_scale: bool = False
    dropout_p: float = 0
    num_heads_kv: int = -1
    variant: LayerVariant = PLAIN
    attention_window: int = 512

    def __post_init__(self) -> None:
        """Raise ConfigError for values that cannot be."""
        check_fields(self)

    def linear(self, dim_in: int, dim_out: int, bias: bool | None = None) -> Linear:
        """One of the maps."""
        return Linear(
            dim_in,
            dim_out,
            length_scale=self.length_scale,
            dtype=self.dtype,
            int8=self.int8,
            init_mean=self.init_mean,
            init_std=self.init_std,
            bias=self.bias if bias is None else bias,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """Arguments of a TransformerBlock and its parts, each of which takes those that it needs.

    Attributes:
        dim_model: width of the hidden states.
        dim_ff: inner width of the feed-forward network.
        num_heads: heads of each attention.
        dim_head: width of each head.
        is_decoder: whether there is a cross-attention.
        dtype: of parameters and computation.
        int8: accepted; it does nothing, as in ModelCenter.
        norm_init_var: `init_var` of every LayerNorm.
        norm_bias: `bias` of every LayerNorm.
        norm_eps: `eps` of every LayerNorm.
        att_init_mean: `init_mean` of every Attention.
        att_init_std: `init_std` of every Attention.
        att_bias: `bias` of every Attention.
        att_mask_value: accepted; hidden keys always have the weight 0.
        ffn_init_mean: `init_mean` of the FeedForward.
        ffn_init_std: `init_std` of the FeedForward.
        ffn_bias: `bias` of the FeedForward.
        ffn_activate_fn: `activate_fn` of the FeedForward.
        pos_bias_type: of every Attention.
        post_layer_norm: whether the residual is the normalised input; not in the cross-attention.
        parallel_ffn: whether the feed-forward network reads the input of the layer, not what
            attention made of it (GPT-J).
        length_scale: divide products by the square root of their length, as in `Linear`.
        attn_scale: of every Attention.
        dropout_p: of the output of each part, and of the probabilities of attention.
        sparse_attention: whether self-attention is Longformer's.
        attention_window: tokens that each token sees around it then; even.
        mask_att: leave the self-attention out.
        mask_cross: leave the cross-attention out.
        mask_ffn: leave the feed-forward network out.
        num_heads_kv: of the self-attention, as in `AttentionOptions`.
        variant: settings of newer models, which ModelCenter does not have.

    Raises:
        ConfigError: naming the value.
    """

    dim_model: int = 0
    dim_ff: int = 0
    num_heads: int = 0
    dim_head: int = 0
    is_decoder: bool = False
    dtype: torch.dtype = torch.half
    int8: bool = False
    norm_init_var: float = 1.0
    norm_bias: bool = False
    norm_eps: float = 1e-5
    att_init_mean: float = 0.0
    att_init_std: float = 0.02
    att_bias: bool = False
    att_mask_value: float = -math.inf
    ffn_init_mean: float = 0.0
    ffn_init_std: float = 0.02
    ffn_bias: bool = False
    ffn_activate_fn: str = "gated_gelu"
    pos_bias_type: str = "none"
    post_layer_norm: bool = False
    parallel_ffn: bool = False
    length_scale: bool = False
    attn_scale: bool = False
    dropout_p: float = 0
    sparse_attention: bool = False
    attention_window: int = 512
    mask_att: bool = False
    mask_cross: bool = False
    mask_ffn: bool = False
    num_heads_kv: int = -1
    variant: LayerVariant = PLAIN

    def __post_init__(self) -> None:
        """Raise ConfigError for values that cannot be; sizes are checked by those that use them."""
        check_fields(self, leave_out=("dim_model", "dim_ff", "num_heads", "dim_head"))

    def norm(self) -> LayerNorm:
        """A LayerNorm of hidden states."""
        return LayerNorm(
            self.dim_model, self.dtype, self.norm_bias, self.norm_eps, self.norm_init_var
        )

    def attention(self) -> AttentionOptions:
        """Those of a cross-attention; a self-attention has more."""
        return AttentionOptions(
            dim_in=self.dim_model,
            dim_head=self.dim_head,
            num_heads=self.num_heads,
            dtype=self.dtype,
            int8=self.int8,
            init_mean=self.att_init_mean,
            init_std=self.att_init_std,
            bias=self.att_bias,
            mask_value=self.att_mask_value,
            pos_bias_type=self.pos_bias_type,
            length_scale=self.length_scale,
            attn_scale=self.attn_scale,
            dropout_p=self.dropout_p,
        )


READY = (AttentionOptions, LayerOptions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackOptions(LayerOptions):
    """Arguments of an Encoder or a Decoder.

    Attributes:
        num_layers: how many.
        mask_modules: for each layer which parts to leave out: (attention, feed-forward network), in
            a Decoder (attention, cross-attention, feed-forward network).
        sharding: how the layers are sharded in a process group.

    The others are those of each layer, as in `LayerOptions`.
    """

    num_layers: int = 0
    mask_modules: Sequence[Sequence[bool]] | None = None
    sharding: ShardingPolicy = ShardingPolicy()  # noqa: RUF009 (it is frozen)

    def layer(self, place: int, *parts: str) -> LayerOptions:
        """The options of the layer at this place; `parts` names the flags in `mask_modules`."""
        given = [False] * len(parts) if self.mask_modules is None else self.mask_modules[place]
        flags: dict[str, Any] = dict(zip(parts, map(bool, given), strict=True))
        return dataclasses.replace(self, variant=self.variant.of_layer(place), **flags)


def takes(
    required: str, *optional: str, by_name: str = "", kind: type[Any] = LayerOptions
) -> Callable[[Callable[[Any, Any], None]], Callable[..., None]]:
    """Make `__init__(self, options)` take ModelCenter's arguments, or options that are ready.

    Args:
        required: names of fields that must be given, in order, between blanks.
        optional: those with the default of the field, which can be given by position too.
        by_name: those that can be given by name only, with the default of the field if it has one.
        kind: the options that are made of them.

    The constructor raises a TypeError for arguments that it does not take, and for missing ones.
    """
    defaults = {field.name: (field.default, field.type) for field in dataclasses.fields(kind)}

    def parameter(name: str, where: Any, needed: bool = False) -> inspect.Parameter:
        default, annotation = defaults[name]
        if needed or default is dataclasses.MISSING:
            default = inspect.Parameter.empty
        return inspect.Parameter(name, where, default=default, annotation=annotation)

    anyhow, named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    own = inspect.Signature(
        [
            *(parameter(name, anyhow, needed=True) for name in required.split()),
            *(parameter(name, anyhow) for name in " ".join(optional).split()),
            *(parameter(name, named) for name in by_name.split()),
        ]
    )

    def decorate(init: Callable[[Any, Any], None]) -> Callable[..., None]:
        @functools.wraps(init)
        def constructor(self: Any, *args: Any, **given: Any) -> None:
            if len(args) == 1 and not given and isinstance(args[0], READY):
                return init(self, args[0])
            problem = unknown(type(self).__name__, given, own.parameters)
            if problem is not None:
                raise ArgumentError(problem)
            try:
                values = own.bind(*args, **given).arguments
            except TypeError as error:
                raise ArgumentError(f"{type(self).__name__}: {error}") from None
            return init(self, kind(**values))

        of_self = inspect.Parameter("self", anyhow)
        vars(constructor)["__signature__"] = own.replace(
            parameters=[of_self, *own.parameters.values()]
        )
        return constructor

    return decorate
