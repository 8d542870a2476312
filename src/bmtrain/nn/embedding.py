"""An embedding whose vocabulary is split over the tensor-parallel ranks, and the same table as the
output head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bmtrain.distributed import tensor_parallel
from bmtrain.errors import ConfigurationError
from bmtrain.nn.linear import check_sizes, part_of
from bmtrain.nn.parallel_linear import OpParallelLinear
from bmtrain.runtime import world
from bmtrain.shard.module import DistributedModule
from bmtrain.shard.parameter import DistributedParameter, ParameterInitializer, computed_with


class VPEmbedding(DistributedModule):
    """A table of `vocab_size` rows of `embedding_size` numbers, of which every tensor-parallel rank
    holds a run of rows.

    The table itself never travels: ids are gathered, every rank looks up those it holds, and the
    sum over ranks brings each rank the rows of its own ids.

    Args:
        vocab_size: rows of the whole table; it must be a multiple of tp_size.
        embedding_size: length of a row.
        dtype: of the table; None is torch's default.
        init_mean, init_std: of the normal distribution that the first values are drawn from.

    Raises:
        ConfigurationError: when the ranks do not divide `vocab_size`.
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
        """Look ids up, or score hidden states against all rows of the table. Collective over the
        tensor-parallel ranks.

        Args:
            x: this rank's ids, an integer tensor of any shape (the same shape on all
                tensor-parallel ranks); with `projection` its hidden states (rows, ...,
                embedding_size).
            projection: which of the two.

        Returns:
            Embeddings (*x.shape, embedding_size); with `projection` logits (rows of all ranks, ...,
            vocab_size / tp_size): this rank's part of the vocabulary, for
            FusedCrossEntropy(parallel=True) and the targets of all rows.

        Raises:
            ConfigurationError: on every rank, for shapes that differ between ranks or, on a CPU, an
                id that is out of range; a GPU stops at such an id, as with torch.
        """
        if projection:
            return OpParallelLinear.apply(x, self.weight, gather_input=True)
        if x.is_floating_point() or x.dtype == torch.bool:
            raise ConfigurationError(
                f"VPEmbedding got ids of {x.dtype}: expected integers; projection=True "
                "takes hidden states."
            )
        if self._num_ranks == 1:
            self._check_range(x)
            return F.embedding(x, computed_with(self.weight))
        return tensor_parallel.scatter_rows(
            self._look_up(tensor_parallel.gather_rows(x.reshape(-1)))
        ).view(*x.shape, self.embedding_size)

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        return f"vocab_size={self.vocab_size}, embedding_size={self.embedding_size}"

    def _look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows (ids, embedding_size) of those ids (ids,) that this rank holds, zeros for the
        others.
        """
        self._check_range(ids)
        weight = computed_with(self.weight)
        local = ids - self._first
        here = (local >= 0) & (local < weight.shape[0])
        exists = (ids >= 0) & (ids < self.vocab_size)
        # An id that no rank holds is left out of range: the lookup refuses it, where zeros would
        # pass unseen.
        rows = F.embedding(
            torch.where(here, local, torch.where(exists, 0, weight.shape[0])), weight
        )
        return torch.where(here[:, None], rows, 0)

    def _check_range(self, ids: torch.Tensor) -> None:
        """All ranks see the same ids, and so the same error."""
        # Reading values stops a GPU, and a compiler's trace; there the lookup itself refuses.
        if ids.device.type != "cpu" or torch.compiler.is_compiling():
            return
        bad = ids[(ids < 0) | (ids >= self.vocab_size)]
        if bad.numel():
            raise ConfigurationError(
                f"VPEmbedding got the id {int(bad[0])} ({bad.numel()} of {ids.numel()} "
                "ids of the tensor-parallel ranks are out of "
                f"range): expected 0 to {self.vocab_size - 1}; check that the "
                "vocabulary of the data is that of the model."
            )
