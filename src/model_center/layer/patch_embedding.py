"""PatchEmbedding: an image as a sequence of embedded patches, with a class token and positions."""

from __future__ import annotations

import torch

import bmtrain as bmt
from model_center.errors import InputError
from model_center.layer.conv import Conv2d
from model_center.layer.parameter import normal, parameter


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
