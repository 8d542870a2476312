"""Linear maps whose weight is split over the tensor-parallel ranks, which work on the rows of all
of them together.

Source: Shoeybi et al., "Megatron-LM" (2019) for the split by columns and rows; Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (2022) for ranks that keep rows of
their own between the split layers.
"""

from __future__ import annotations

import enum

import torch
import torch.nn.functional as F

from bmtrain.distributed import tensor_parallel
from bmtrain.errors import ConfigurationError
from bmtrain.nn.linear import check_sizes, fan_in_uniform, part_of, zeros
from bmtrain.runtime import world
from bmtrain.shard.module import DistributedModule
from bmtrain.shard.parameter import DistributedParameter, Initializer, computed_with


class ReduceType(enum.Enum):
    """What becomes of the partial products of the tensor-parallel ranks."""

    ALL_REDUCE = "all_reduce"  #: every rank gets the sum of all rows
    REDUCE_SCATTER = "reduce_scatter"  #: every rank gets the sum of its own rows


class OpParallelLinear:
    """A linear map with one part of the weight, as an operation on tensors."""

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
        """`input @ weight.T + bias`, with what the flags say before and after. Collective over the
        tensor-parallel ranks.

        Args:
            input: (rows, ..., n); (..., n) will do if no rows are gathered or scattered.
            weight: (m, n): this rank's rows of the whole (columns, for a sum over ranks).
            bias: (m,) or None. Where products are summed it is added once, to the sum.
            gather_input: the rows (dim 0) of all ranks, not only this rank's, in rank order.
            gather_output: the features (last dim) of all ranks, not only this rank's, in rank
                order.
            split_input: take this rank's n of the last dim's ranks * n.
            reduce_output_type: how products are summed over ranks; None if they are not partial.
            async_gather_chunks: parts in which rows travel while others are multiplied; fewer if
                they do not divide the rows.

        Raises:
            ConfigurationError: on every rank, for shapes or dtypes that do not fit together or
                differ between ranks.
        """
        weight, bias = computed_with(weight), None if bias is None else computed_with(bias)
        if reduce_output_type is not None and not isinstance(reduce_output_type, ReduceType):
            raise ConfigurationError(
                f"reduce_output_type is {reduce_output_type!r}: expected None or one of "
                f"{list(ReduceType)}."
            )
        if reduce_output_type is None and split_input:
            raise ConfigurationError(
                "split_input without reduce_output_type: the products would be parts of "
                "sums; name the sum."
            )
        if reduce_output_type is not None and gather_input:
            raise ConfigurationError(
                "gather_input with reduce_output_type: whole products would be summed; "
                "leave one of them out."
            )
        if world.current("OpParallelLinear").mesh.tp.size == 1:
            return F.linear(input, weight, bias)
        input, weight, bias = (
            _autocast(input),
            _autocast(weight),
            None if bias is None else _autocast(bias),
        )
        if reduce_output_type is not None:
            product = _summed(input, weight, split_input, reduce_output_type, async_gather_chunks)
            product = product if bias is None else product + bias
        elif gather_input:
            product = tensor_parallel.gather_linear(input, weight, bias, async_gather_chunks)
        else:
            product = F.linear(input, weight, bias)
        return tensor_parallel.gather_features(product) if gather_output else product


class ColumnParallelLinear(DistributedModule):
    """A linear map of which every tensor-parallel rank computes a part of the output features.

    Args:
        in_features, out_features: of the whole map; `out_features` is split, the weight and the
            bias along dim 0.
        bias: whether to add one.
        dtype: of the parameters; None is torch's default.
        gather_output: return all output features on every rank, not only this rank's.
        gather_input: every rank passes rows (dim 0) of its own, and the output has the rows of all
            of them in rank order; otherwise the input must be the same on all ranks, and its
            gradient is this rank's part of the sum.
        async_gather_chunks: parts in which rows travel while others are multiplied.
        init_method: called with the whole weight (out_features, in_features); None as in `Linear`.

    Raises:
        ConfigurationError: when the ranks do not divide `out_features`; on use, on every rank, when
            their inputs differ in shape.
    """

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
        num_ranks = world.current("ColumnParallelLinear").mesh.tp.size
        check_sizes(
            "ColumnParallelLinear",
            in_features=in_features,
            out_features=out_features,
            async_gather_chunks=async_gather_chunks,
        )
        own = part_of("ColumnParallelLinear", "out_features", out_features, num_ranks)
        self.in_features, self.out_features = in_features, out_features
        self.gather_output, self.gather_input, self.async_gather_chunks = (
            gather_output,
            gather_input,
            async_gather_chunks,
        )
        self.weight = DistributedParameter(
            torch.empty(own, in_features, dtype=dtype),
            init_method=init_method or fan_in_uniform(in_features),
            tp_mode=True,
            tp_split_dim=0,
        )
        vector = torch.empty(own, dtype=dtype) if bias else None
        self.register_parameter(
            "bias",
            None
            if vector is None
            else DistributedParameter(vector, init_method=zeros(), tp_mode=True, tp_split_dim=0),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, ..., in_features) -> (rows of all ranks, ..., out_features / ranks); see the
        arguments of the class.
        """
        return OpParallelLinear.apply(
            x,
            self.weight,
            self._parameters["bias"],
            self.gather_input,
            self.gather_output,
            False,
            None,
            self.async_gather_chunks,
        )

    def extra_repr(self) -> str:
        """Arguments, for printing."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self._parameters['bias'] is not None}, "
            f"gather_output={self.gather_output}, gather_input={self.gather_input}"
        )


class RowParallelLinear(DistributedModule):
    """A linear map of which every tensor-parallel rank multiplies a part of the input features; the
    products are summed.

    Args:
        in_features, out_features: of the whole map; `in_features` is split, the weight along dim 1.
            The bias is not split, and is added once, to the sum.
        bias: whether to add one.
        dtype: of the parameters; None is torch's default.
        split_input: the input has all features, of which the layer takes this rank's; otherwise it
            has this rank's only.
        all_reduce_output: return all rows on every rank; otherwise each rank gets its own rows (dim
            0) back.
        async_chunks: parts in which rows travel while others are multiplied.
        init_method: called with the whole weight (out_features, in_features); None as in `Linear`.

    Raises:
        ConfigurationError: when the ranks do not divide `in_features`; on use, on every rank, when
            their inputs differ in shape or their rows cannot be divided among them.
    """

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
        num_ranks = world.current("RowParallelLinear").mesh.tp.size
        check_sizes(
            "RowParallelLinear",
            in_features=in_features,
            out_features=out_features,
            async_chunks=async_chunks,
        )
        own = part_of("RowParallelLinear", "in_features", in_features, num_ranks)
        self.in_features, self.out_features = in_features, out_features
        self.split_input, self.async_chunks = split_input, async_chunks
        self.reduce_type = ReduceType.ALL_REDUCE if all_reduce_output else ReduceType.REDUCE_SCATTER
        self.weight = DistributedParameter(
            torch.empty(out_features, own, dtype=dtype),
            init_method=init_method or fan_in_uniform(in_features),
            tp_mode=True,
            tp_split_dim=1,
        )
        self.register_parameter(
            "bias",
            DistributedParameter(torch.empty(out_features, dtype=dtype), init_method=zeros())
            if bias
            else None,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows of all ranks, ..., in_features / ranks) -> (rows, ..., out_features); see the
        arguments of the class.
        """
        return OpParallelLinear.apply(
            x,
            self.weight,
            self._parameters["bias"],
            False,
            False,
            self.split_input,
            self.reduce_type,
            self.async_chunks,
        )

    def extra_repr(self) -> str:
        """Arguments, for printing."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self._parameters['bias'] is not None}, "
            f"split_input={self.split_input}, reduce_type={self.reduce_type.name}"
        )


def _summed(
    x: torch.Tensor, weight: torch.Tensor, split_input: bool, kind: ReduceType, num_chunks: int
) -> torch.Tensor:
    if kind is ReduceType.REDUCE_SCATTER:
        return tensor_parallel.linear_scatter(x, weight, split_input, num_chunks)
    return tensor_parallel.linear_reduce(x, weight, split_input)


def _autocast(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype that torch.nn.functional.linear would take it to under autocast."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x
