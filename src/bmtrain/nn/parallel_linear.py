"""Tensor-parallel linear layers, with sequence parallelism between them.

Source: Shoeybi et al., "Megatron-LM" (2019) for the split by columns and rows; Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (2022) for sequence parallelism, in
which each rank keeps only its own rows between the split layers.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
import torch.nn.functional as F

from bmtrain.distributed import tensor_parallel
from bmtrain.errors import ConfigurationError
from bmtrain.nn.linear import ZEROS, check_sizes, fan_in_uniform, options_of, part_of
from bmtrain.runtime import world
from bmtrain.shard.module import DistributedModule
from bmtrain.shard.parameter import DistributedParameter, Initializer, computed_with


class ReduceType(enum.Enum):
    """The collective that sums the partial products of the tensor-parallel ranks."""

    ALL_REDUCE = "all_reduce"  #: each rank gets the sums of all rows
    REDUCE_SCATTER = "reduce_scatter"  #: each rank gets the sums of its own rows


class OpParallelLinear:
    """The tensor-parallel linear layer as a function of tensors."""

    @staticmethod
    def apply(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        gather_input: bool = False,
        gather_output: bool = False,
        split_input: bool = False,
        reduce_output_type: ReduceType | None = None,
        async_gather_chunks: int = 2,
    ) -> torch.Tensor:
        """`input @ weight.T + bias` with communication before and after.

        Collective over the tensor-parallel ranks.

        Args:
            input: (rows, ..., n); (..., n) is enough if no rows are gathered or scattered.
            weight: (m, n): this rank's rows of the full weight, or its columns if products are
                summed over ranks.
            bias: (m,) or None. If products are summed, it is added once, to the sum.
            gather_input: all-gather the input's rows (dim 0), in rank order.
            gather_output: all-gather the output's features (last dim), in rank order.
            split_input: the input's last dim has the features of all ranks (tp_size * n); use only
                this rank's n.
            reduce_output_type: how to sum partial products over ranks; None if they are complete.
            async_gather_chunks: the most chunks in which communication of rows overlaps the
                matmul; fewer if it does not divide the rows, or if their product is short.

        Raises:
            ConfigurationError: on every rank, for shapes or dtypes that do not fit together or
                differ between ranks; for `split_input` without `reduce_output_type`, or
                `gather_input` or `gather_output` with it.
        """
        weight, bias = computed_with(weight), None if bias is None else computed_with(bias)
        if reduce_output_type is not None and not isinstance(reduce_output_type, ReduceType):
            raise ConfigurationError(
                f"reduce_output_type is {reduce_output_type!r}: expected None or one of "
                f"{list(ReduceType)}."
            )
        if reduce_output_type is None and split_input:
            raise ConfigurationError(
                "split_input without reduce_output_type would return partial sums: "
                "choose a reduce_output_type."
            )
        if reduce_output_type is not None and (gather_input or gather_output):
            raise ConfigurationError(
                f"reduce_output_type excludes gather_input and gather_output, got {gather_input} "
                f"and {gather_output}: leave one of them out."
            )
        if world.current("OpParallelLinear").mesh.tp.size == 1:
            return F.linear(input, weight, bias)
        input, weight = _autocast(input), _autocast(weight)
        bias = None if bias is None else _autocast(bias)
        if reduce_output_type is not None:
            if reduce_output_type is ReduceType.REDUCE_SCATTER:
                product = tensor_parallel.linear_scatter(
                    input, weight, split_input, async_gather_chunks
                )
            else:
                product = tensor_parallel.linear_reduce(input, weight, split_input)
            product = product if bias is None else product + bias
        elif gather_input:
            product = tensor_parallel.gather_linear(input, weight, bias, async_gather_chunks)
        else:
            product = F.linear(input, weight, bias)
        if not gather_output:
            return product
        # along the last dim, in rank order
        return tensor_parallel.gather_rows(product.unsqueeze(0)).movedim(0, -2).flatten(-2)


class _ParallelLinear(DistributedModule):
    """A linear layer of which each tensor-parallel rank has a part of the weight."""

    in_features: int
    out_features: int
    gather_input = gather_output = split_input = False
    reduce_type: ReduceType | None = None
    chunks: str  # the attribute that says in how many communication is cut

    def _make(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype | None,
        init_method: Initializer | None,
        split_dim: int,
        **chunks: int,
    ) -> None:
        """Make the parameters; the weight is split along `split_dim`, a bias along 0 or not."""
        name, sizes = (
            type(self).__name__,
            {"out_features": out_features, "in_features": in_features},
        )
        num_ranks = world.current(name).mesh.tp.size
        check_sizes(name, **sizes, **chunks)
        shape, split = list(sizes.values()), list(sizes)[split_dim]
        shape[split_dim] = part_of(name, split, shape[split_dim], num_ranks)
        self.in_features, self.out_features = in_features, out_features
        self.weight = DistributedParameter(
            torch.empty(*shape, dtype=dtype),
            init_method=init_method or fan_in_uniform(in_features),
            tp_mode=True,
            tp_split_dim=split_dim,
        )
        vector = None
        if bias:
            cut: dict[str, Any] = {} if split_dim else {"tp_mode": True, "tp_split_dim": 0}
            values = torch.empty(shape[0], dtype=dtype)
            vector = DistributedParameter(values, init_method=ZEROS, **cut)
        self.register_parameter("bias", vector)
        vars(self).update(chunks)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input` (rows, ..., features) -> (rows, ..., features), of this rank or of all.

        ColumnParallelLinear: (rows, ..., in_features) -> (rows of all ranks, ..., out_features /
        tp_size). RowParallelLinear: (rows of all ranks, ..., in_features / tp_size) -> (rows, ...,
        out_features). The constructor's options change the shapes.
        """
        return OpParallelLinear.apply(
            input,
            self.weight,
            self._parameters["bias"],
            self.gather_input,
            self.gather_output,
            self.split_input,
            self.reduce_type,
            vars(self)[self.chunks],
        )

    extra_repr = options_of


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer of which each tensor-parallel rank computes a part of the output features.

    Args:
        in_features: size of the last dim of the input.
        out_features: of all tensor-parallel ranks; weight and bias are split along dim 0.
        bias: whether to add a bias.
        dtype: the dtype of the parameters; None is torch's default.
        gather_output: return all output features on every rank instead of this rank's.
        gather_input: each rank passes its own rows (dim 0), and the output has the rows of all
            ranks, in rank order. If False, the input must be the same on all ranks, and its
            gradient is this rank's term of a sum over ranks.
        async_gather_chunks: the most chunks in which the gather overlaps the matmul.
        init_method: called with the full weight (out_features, in_features); None as in `Linear`.

    Raises:
        ConfigurationError: when the ranks do not divide `out_features`; on use, on every rank, when
            their inputs differ in shape.
    """

    chunks = "async_gather_chunks"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        gather_output: bool = False,
        gather_input: bool = True,
        async_gather_chunks: int = 2,
        *,
        init_method: Initializer | None = None,
    ) -> None:
        super().__init__()
        self._make(
            in_features,
            out_features,
            bias,
            dtype,
            init_method,
            0,
            async_gather_chunks=async_gather_chunks,
        )
        self.gather_output, self.gather_input = gather_output, gather_input


class RowParallelLinear(_ParallelLinear):
    """A linear layer of which each tensor-parallel rank multiplies a part of the input features.

    The partial products are summed over ranks.

    Args:
        in_features: of all tensor-parallel ranks; the weight is split along dim 1.
        out_features: size of the last dim of the output. The bias is not split; it is added once,
            to the sum.
        bias: whether to add a bias.
        dtype: the dtype of the parameters; None is torch's default.
        split_input: the input has the features of all ranks, and the layer uses this rank's; if
            False, the input has only this rank's features.
        all_reduce_output: return all rows on every rank; if False, each rank gets its own rows (dim
            0).
        async_chunks: the most chunks in which the reduce-scatter overlaps the matmul.
        init_method: called with the full weight (out_features, in_features); None as in `Linear`.

    Raises:
        ConfigurationError: if `in_features` is not a multiple of tp_size; in forward, on every
            rank, if inputs differ in shape or the number of rows is not a multiple of tp_size.
    """

    chunks = "async_chunks"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        split_input: bool = False,
        all_reduce_output: bool = False,
        async_chunks: int = 2,
        *,
        init_method: Initializer | None = None,
    ) -> None:
        super().__init__()
        self._make(
            in_features, out_features, bias, dtype, init_method, 1, async_chunks=async_chunks
        )
        self.split_input = split_input
        self.reduce_type = ReduceType.ALL_REDUCE if all_reduce_output else ReduceType.REDUCE_SCATTER


def _autocast(x: torch.Tensor) -> torch.Tensor:
    """Cast `x` as autocast would for F.linear, which autocast does not see inside our operators."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x
