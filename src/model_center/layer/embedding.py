"""Rows looked up by number, the same table as an output head, and images as embedded patches."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

import bmtrain as bmt
from model_center.config.rules import check_values
from model_center.errors import InputError
from model_center.layer.conv import Conv2d
from model_center.layer.decode_row import product
from model_center.layer.parameter import Initializer, normal, parameter


class Embedding(bmt.DistributedModule):
    """A table of `vocab_size` rows of `embedding_size` numbers.

    Args:
        vocab_size: rows of `weight`.
        embedding_size: its columns.
        length_scale: divide rows looked up, and inputs of `projection`, by sqrt(embedding_size).
        dtype: of the table.
        int8: accepted; it does nothing, as in ModelCenter.
        init_mean: mean of the first values.
        init_std: their standard deviation.
        padding_idx: a row that starts at 0 and gets no gradient from lookups; negative ones count
            from the end.
    """

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        length_scale: bool = False,
        dtype: torch.dtype = torch.half,
        int8: bool = False,
        init_mean: float = 0.0,
        init_std: float = 1,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        sizes = {"vocab_size": vocab_size, "embedding_size": embedding_size}
        check_values("Embedding", {**sizes, "init_mean": init_mean, "init_std": init_std})
        if padding_idx is not None and padding_idx < 0:
            padding_idx += vocab_size
        self.dim_model, self.length_scale, self.padding_idx = (
            embedding_size,
            length_scale,
            padding_idx,
        )
        self.num_embeddings = vocab_size
        self.weight = parameter(
            (vocab_size, embedding_size), dtype, _first_values(init_mean, init_std, padding_idx)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Integer ids (...) to rows (..., embedding_size).

        Raises:
            InputError: for ids that are no integers, and on the CPU for ids outside the table.
        """
        check_range(ids, self.num_embeddings, "the embedding")
        rows = F.embedding(ids, self.weight, self.padding_idx)
        return rows / math.sqrt(self.dim_model) if self.length_scale else rows

    def projection(self, x: torch.Tensor) -> torch.Tensor:
        """Scores (..., vocab_size) of hidden states `x` (..., embedding_size): a tied head."""
        if self.length_scale:
            x = x / math.sqrt(self.dim_model)
        row = product(x, self.weight)
        return F.linear(x, self.weight) if row is None else row


class PatchEmbedding(bmt.DistributedModule):
    """Images (batch, in_chans, img_size, img_size) to (batch, patches + 1, embed_dim).

    Args:
        img_size, patch_size: in pixels; the patches are squares side by side.
        in_chans: colours.
        embed_dim: width of an embedded patch.
        flatten: only True: a sequence of patches.
        dtype: of the parameters.

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words" (2020).
    """

    def __init__(
        self,
        img_size: int = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        flatten: bool = True,
        dtype: torch.dtype = torch.half,
    ) -> None:
        super().__init__()
        if not flatten:
            raise InputError(
                "PatchEmbedding(flatten=False) is not supported: the class token and "
                "positions need a sequence."
            )
        self.img_size, self.in_chans = img_size, in_chans
        num_patches = (img_size // patch_size) ** 2
        self.proj = Conv2d(
            in_chans, embed_dim, patch_size, stride=patch_size, dtype=dtype, init_std=0.02
        )
        self.cls_token = parameter((1, 1, embed_dim), dtype, normal(0.0, 0.02))
        self.pos_embed = parameter((1, num_patches + 1, embed_dim), dtype, normal(0.0, 0.02))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Embed images of any floating-point dtype.

        Raises:
            InputError: for images of another size.
        """
        expected = (self.in_chans, self.img_size, self.img_size)
        if x.dim() != 4 or tuple(x.shape[1:]) != expected:
            raise InputError(
                f"got images of shape {tuple(x.shape)}: expected (batch, *{expected})."
            )
        token = self.cls_token.expand(x.shape[0], -1, -1)
        patches = self.proj(x.to(token.dtype)).flatten(2).transpose(1, 2)
        return torch.cat([token, patches], 1) + self.pos_embed


def check_range(numbers: torch.Tensor, size: int, what: str) -> None:
    """Demand integers from 0 to `size` - 1; `what` they are is for the message.

    Raises:
        InputError: for other dtypes, and on the CPU for other numbers.
    """
    if numbers.is_floating_point() or numbers.dtype == torch.bool:
        raise InputError(f"{what} got ids of {numbers.dtype}: expected integers.")
    # Where they are on a GPU, looking at them would stop the program until the GPU has them.
    if numbers.device.type == "cpu" and numbers.numel() > 0 and not torch.compiler.is_compiling():
        low, high = (int(end) for end in numbers.aminmax())
        if low < 0 or high >= size:
            raise InputError(f"{what} of {size} rows got ids from {low} to {high}.")


def _first_values(mean: float, std: float, padding_idx: int | None) -> Initializer:
    if padding_idx is None:
        return normal(mean, std)
    return bmt.ParameterInitializer(_normal_but_one_row, mean, std, padding_idx)


def _normal_but_one_row(table: torch.Tensor, mean: float, std: float, row: int) -> None:
    torch.nn.init.normal_(table, mean, std)
    table[row].zero_()
