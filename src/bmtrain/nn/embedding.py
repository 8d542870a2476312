"""A vocabulary-parallel embedding, which also serves as the output head."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bmtrain.distributed import tensor_parallel
from bmtrain.errors import ConfigurationError
from bmtrain.nn.linear import check_sizes, options_of, part_of
from bmtrain.nn.parallel_linear import OpParallelLinear
from bmtrain.runtime import world
from bmtrain.shard.module import DistributedModule
from bmtrain.shard.parameter import DistributedParameter, ParameterInitializer, computed_with


class VPEmbedding(DistributedModule):
    """An embedding (vocab_size, embedding_size) split by rows over the tensor-parallel ranks.

    Tensor-parallel ranks exchange no weights. They all-gather the ids, each looks up the ids in its
    part of the vocabulary, and a reduce-scatter returns to each rank the rows of its own ids.

    Args:
        vocab_size: rows of the full table, a multiple of tp_size.
        embedding_size: length of a row.
        dtype: the dtype of the table; None is torch's default.
        init_mean, init_std: mean and standard deviation of the normal distribution of initial
            values.

    Raises:
        NotInitializedError: before `init_distributed`.
        ConfigurationError: if `vocab_size` is not a multiple of tp_size, or a size is not a whole
            number above 0.
    """

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        dtype: torch.dtype | None = None,
        init_mean: float = 0.0,
        init_std: float = 1.0,
    ) -> None:
        super().__init__()
        axis = world.current("VPEmbedding").mesh.tp
        check_sizes("VPEmbedding", vocab_size=vocab_size, embedding_size=embedding_size)
        own = part_of("VPEmbedding", "vocab_size", vocab_size, axis.size)
        self.vocab_size, self.embedding_size = vocab_size, embedding_size
        self._num_ranks, self._first = axis.size, axis.index * own
        self.weight = DistributedParameter(
            torch.empty(own, embedding_size, dtype=dtype),
            init_method=ParameterInitializer(torch.nn.init.normal_, mean=init_mean, std=init_std),
            tp_mode=True,
            tp_split_dim=0,
        )

    def forward(self, x: torch.Tensor, projection: bool = False) -> torch.Tensor:
        """Look ids up, or project hidden states to logits. Collective over tensor-parallel ranks.

        Args:
            x: this rank's ids, an integer tensor of any shape (the same shape on all
                tensor-parallel ranks); with `projection` its hidden states (rows, embedding_size)
                or (batch, seq, ..., embedding_size).
            projection: whether to project.

        Returns:
            Embeddings `(*x.shape, embedding_size)`; with `projection` logits of this rank's part of
            the vocabulary, for FusedCrossEntropy(parallel=True): (rows of all ranks, vocab_size /
            tp_size), or (batch, seq of all ranks, ..., vocab_size / tp_size), since BMTrain's
            models cut sequences among the tensor-parallel ranks.

        Raises:
            ConfigurationError: for ids that are no integers; on every rank, for shapes that differ
                between ranks or, on a CPU, for an id out of range. On a GPU such an id triggers a
                device-side assert, as in torch.
        """
        if projection and (x.dim() < 3 or self._num_ranks == 1):
            return OpParallelLinear.apply(x, self.weight, gather_input=True)
        if projection:
            # Hidden states are gathered first: to turn logits round would copy the largest tensor.
            whole = tensor_parallel.gather_rows(x.transpose(0, 1).contiguous()).transpose(0, 1)
            return F.linear(whole.contiguous(), computed_with(self.weight))
        if x.is_floating_point() or x.dtype == torch.bool:
            raise ConfigurationError(
                f"VPEmbedding got ids of {x.dtype}: expected integers; projection=True "
                "takes hidden states."
            )
        ids = x if self._num_ranks == 1 else tensor_parallel.gather_rows(x.reshape(-1))
        # Reading values would synchronise with a GPU and break the graph of a compiler; there the
        # lookup itself fails. All ranks have gathered the same ids, so all raise alike.
        if ids.device.type == "cpu" and not torch.compiler.is_compiling():
            bad = ids[(ids < 0) | (ids >= self.vocab_size)]
            if bad.numel():
                raise ConfigurationError(
                    f"VPEmbedding got the id {int(bad[0])} ({bad.numel()} of {ids.numel()} ids of "
                    "the tensor-parallel ranks are out of range): expected 0 to "
                    f"{self.vocab_size - 1}; check that the vocabulary of the data is that of the "
                    "model."
                )
        weight = computed_with(self.weight)
        if self._num_ranks == 1:
            return F.embedding(x, weight)
        local = ids - self._first
        here = (local >= 0) & (local < weight.shape[0])
        exists = (ids >= 0) & (ids < self.vocab_size)
        # An id outside the vocabulary stays out of range and makes the lookup fail. Mapped to 0, as
        # other ranks' ids are, it would silently yield zeros.
        places = torch.where(here, local, torch.where(exists, 0, weight.shape[0]))
        own = torch.where(here[:, None], F.embedding(places, weight), 0)
        return tensor_parallel.scatter_rows(own).view(*x.shape, self.embedding_size)

    extra_repr = options_of
