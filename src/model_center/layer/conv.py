"""Two-dimensional convolution, and a layer that does nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import bmtrain as bmt
from model_center.errors import ConfigError
from model_center.layer.parameter import constant, normal, parameter

Pair = int | tuple[int, int]


class Identity(torch.nn.Module):
    """Returns its input, whatever it is made with."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input


def to_2tuple(x: Pair) -> tuple[int, int]:
    """A number twice, two numbers as they are."""
    return (x, x) if isinstance(x, int) else x


class Conv2d(bmt.DistributedModule):
    """Convolution of images (batch, in_channels, height, width) as torch.nn.Conv2d computes it.

    Args:
        in_channels, out_channels, kernel_size: as in torch.nn.Conv2d.
        stride, padding, dilation, groups: as in torch.nn.Conv2d.
        dtype: of the parameters.
        int8: accepted; it does nothing, as in ModelCenter.
        init_mean: mean of the first weights; the bias starts at 0.
        init_std: their standard deviation.
        bias: whether to add one.
        padding_mode: "zeros" only.

    Raises:
        ConfigError: for another `padding_mode`.
    """

    def __init__(  # noqa: PLR0913 (ModelCenter's signature)
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair | str = 0,
        dilation: Pair = 1,
        groups: int = 1,
        dtype: torch.dtype = torch.float,
        int8: bool = False,
        init_mean: float = 0.0,
        init_std: float = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
    ) -> None:
        if padding_mode != "zeros":
            raise ConfigError(f"padding_mode is {padding_mode!r}: only 'zeros' is supported.")
        super().__init__()
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        height, width = to_2tuple(kernel_size)
        self.weight = parameter(
            (out_channels, in_channels // groups, height, width), dtype, normal(init_mean, init_std)
        )
        if bias:
            self.bias = parameter((out_channels,), dtype, constant(0.0))
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` (batch, in_channels, height, width) to (batch, out_channels, height', width')."""
        return F.conv2d(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )
