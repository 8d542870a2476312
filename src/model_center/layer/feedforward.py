"""The position-wise feed-forward network, plain or gated."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from model_center.config.rules import GATED, check_values
from model_center.errors import ConfigError
from model_center.kernels import is_fused
from model_center.kernels.gated import gated
from model_center.layer.decode_row import fused_row_linear, is_inactive_dropout, is_unmodified
from model_center.layer.linear import Linear

Activation = Callable[[torch.Tensor], torch.Tensor]


def gelu_new(x: torch.Tensor) -> torch.Tensor:
    """GELU in its tanh form (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Activation] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": gelu_new,
    "silu": F.silu,
}
NAMES = {function: name for name, function in ACTIVATIONS.items()}


def activation(name: str) -> Activation:
    """The function of this name.

    Raises:
        ConfigError: naming those that exist.
    """
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"unknown activation {name!r}: expected one of {', '.join(ACTIVATIONS)}, or "
            "gated_ and one of them."
        )
    return ACTIVATIONS[name]


class DenseACT(torch.nn.Module):
    """`act(w x)`: (..., dim_in) to (..., dim_ff). Args: as in `FeedForward`, the activation not
    gated.
    """

    def __init__(  # noqa: PLR0913 (ModelCenter's signature)
        self,
        dim_in: int,
        dim_ff: int,
        activate_fn: str = "gelu",
        dtype: torch.dtype = torch.half,
        int8: bool = False,
        init_mean: float = 0.0,
        init_std: float = 0.02,
        bias: bool = False,
        length_scale: bool = False,
    ) -> None:
        super().__init__()
        self.act = activation(activate_fn)
        self.w = Linear(dim_in, dim_ff, length_scale, False, dtype, int8, init_mean, init_std, bias)

    @property
    def maps(self) -> list[torch.nn.Module]:
        """The linear maps of the input."""
        return [self.w]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.w(x))


class DenseGatedACT(torch.nn.Module):
    """`act(w_0 x) * (w_1 x)`: (..., dim_in) to (..., dim_ff). Args: as in `DenseACT`.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020).
    """

    def __init__(  # noqa: PLR0913 (ModelCenter's signature)
        self,
        dim_in: int,
        dim_ff: int,
        activate_fn: str = "gelu",
        dtype: torch.dtype = torch.half,
        int8: bool = False,
        init_mean: float = 0.0,
        init_std: float = 0.02,
        bias: bool = False,
        length_scale: bool = False,
    ) -> None:
        super().__init__()
        self.act = activation(activate_fn)
        self.w_0 = Linear(
            dim_in, dim_ff, length_scale, False, dtype, int8, init_mean, init_std, bias
        )
        self.w_1 = Linear(
            dim_in, dim_ff, length_scale, False, dtype, int8, init_mean, init_std, bias
        )

    @property
    def maps(self) -> list[torch.nn.Module]:
        """The linear maps of the input, that of the gate first."""
        return [self.w_0, self.w_1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.w_0(x), self.w_1(x)
        if self.act in NAMES and is_fused(gate, up):
            return gated(gate, up, NAMES[self.act])
        return self.act(gate) * up


class FeedForward(torch.nn.Module):
    """`w_out(act(w_in(x)))`: (..., dim_in) to (..., dim_out).

    Args:
        dim_in, dim_ff, dim_out: sizes; `dim_out` is `dim_in` if None.
        dtype: of parameters and computation.
        int8: accepted; it does nothing, as in ModelCenter.
        init_mean, init_std: of the first weights.
        bias: whether the linear maps have one.
        activate_fn: relu, gelu, gelu_new or silu, or `gated_` and one of them.
        length_scale: divide products by the square root of their length, as in `Linear`.
        dropout_p: of the inner activations.
    """

    def __init__(  # noqa: PLR0913 (ModelCenter's signature)
        self,
        dim_in: int,
        dim_ff: int,
        dim_out: int | None = None,
        dtype: torch.dtype = torch.half,
        int8: bool = False,
        init_mean: float = 0.0,
        init_std: float = 0.02,
        bias: bool = False,
        activate_fn: str = "gated_gelu",
        length_scale: bool = False,
        dropout_p: float = 0,
    ) -> None:
        super().__init__()
        check_values("FeedForward", {"dim_in": dim_in, "dim_ff": dim_ff, "dropout_p": dropout_p})
        kind = DenseGatedACT if activate_fn.startswith(GATED) else DenseACT
        act, maps = activate_fn.removeprefix(GATED), (dtype, int8, init_mean, init_std, bias)
        self.w_in = kind(dim_in, dim_ff, act, *maps, length_scale)
        self.dropout = torch.nn.Dropout(dropout_p)
        width = dim_in if dim_out is None else dim_out
        self.w_out = Linear(dim_ff, width, length_scale, True, *maps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` (..., dim_in) to (..., dim_out)."""
        return self.w_out(self.dropout(self.w_in(x)))

    def of_row(self, x: torch.Tensor, norm: torch.nn.Module) -> torch.Tensor | None:
        """`x + self(norm(x))` of one row (1, 1, dim_in); None if it must be called itself."""
        w_in = self.w_in
        if not (
            is_unmodified(self, FeedForward)
            and is_unmodified(w_in, DenseACT, DenseGatedACT)
            and is_inactive_dropout(self.dropout)
            and w_in.act in NAMES
        ):
            return None
        inner = fused_row_linear(x, w_in.maps, norm=norm, act=NAMES[w_in.act])
        if inner is None:
            return None
        out = fused_row_linear(inner, [self.w_out], residual=x)
        return x + self.w_out(inner) if out is None else out
