"""Rotary positions: pairs of channels turned by an angle that grows with the position.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from model_center.errors import ConfigError, InputError
from model_center.kernels import is_fused
from model_center.kernels.rotary import rotate


class RotaryTables(NamedTuple):
    """The angles of some positions, made once for all layers of a pass.

    Attributes:
        cos, sin: (positions, dim / 2) or (batch, positions, dim / 2), fp32.
        interleaved: whether channels 2i and 2i + 1 are a pair, as in GPT-J, or i and i + dim / 2,
            as in LLaMA.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Turn the first `dim` channels of (batch, heads, positions, dim_head)."""
        cos, sin = (table if table.dim() == 2 else table[:, None] for table in (self.cos, self.sin))
        dim = 2 * cos.shape[-1]
        turned = x[..., :dim].float()
        if self.interleaved:
            one, other = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack([one * cos - other * sin, other * cos + one * sin], -1).flatten(-2)
        else:
            one, other = turned.chunk(2, -1)
            turned = torch.cat([one * cos - other * sin, other * cos + one * sin], -1)
        turned = turned.to(x.dtype)
        return turned if dim == x.shape[-1] else torch.cat([turned, x[..., dim:]], -1)

    def rotate_both(
        self, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`rotate` of both, which may have other numbers of heads."""
        if is_fused(query, key):
            return rotate(query, key, self.cos, self.sin, self.interleaved)
        return self.rotate(query), self.rotate(key)


class Rotary(torch.nn.Module):
    """What both layouts share. It has no parameters: the angles follow from the numbers given.

    Args:
        dim: number of channels that are turned.
        base: wavelength ratio of the last to the first pair.
        interleaved: see RotaryTables.
        distance_scale: positions are multiplied by it.
        scaling: how frequencies are changed for longer sequences, as `rope_scaling` in Hugging Face
            configurations.
    """

    def __init__(
        self,
        dim: int,
        base: float,
        interleaved: bool,
        distance_scale: float = 1.0,
        scaling: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if dim % 2:
            raise ConfigError(f"rotary positions of {dim} channels: expected an even number.")
        self.dim, self.base, self.interleaved, self.distance_scale = (
            dim,
            base,
            interleaved,
            distance_scale,
        )
        self.scaling = dict(scaling or {})
        check_scaling(self.scaling)
        # frequencies on GPUs, by what they follow from
        self._kept: dict[tuple[object, ...], torch.Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and files, which may be for another device."""
        return {**self.__dict__, "_kept": {}}

    def tables(self, positions: torch.Tensor) -> RotaryTables:
        """The angles of integer positions, (positions,) or (batch, positions)."""
        places = positions.float()
        keeps = is_fused(places) and not torch.is_inference_mode_enabled()
        frequencies = self._kept_frequencies(places) if keeps else self._frequencies(places.device)
        angles = (places * self.distance_scale)[..., None] * frequencies
        return RotaryTables(angles.cos(), angles.sin(), self.interleaved)

    def _frequencies(self, device: torch.device) -> torch.Tensor:
        """Angle per position of each pair, (dim / 2,) fp32."""
        channels = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device)
        return scaled_frequencies(self.base ** (-channels / self.dim), self.scaling)

    def _kept_frequencies(self, places: torch.Tensor) -> torch.Tensor:
        """The same, made once: a dozen small kernels, as many as a step has beside its layers."""
        device = places.device
        key = (device, self.dim, self.base, repr(self.scaling))
        if key not in self._kept:
            # a recording's memory is written again by each replay: nothing of it is kept
            if torch.cuda.is_current_stream_capturing():
                return self._frequencies(device)
            self._kept = {key: self._frequencies(device)}
            # Without this, a later pass on another stream could read them before they are there.
            torch.cuda.current_stream(device).synchronize()
        return self._kept[key]

    def rotated(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn both, (..., length, dim_head): keys from 0 on; queries are at the last keys."""
        tables = self.tables(torch.arange(key.shape[-2], device=key.device))
        last = tables._replace(
            cos=tables.cos[-query.shape[-2] :], sin=tables.sin[-query.shape[-2] :]
        )
        return last.rotate(query), tables.rotate(key)


class RotaryEmbedding(Rotary):
    """GPT-J's layout, pairs side by side; only `rotary_dim` channels turn, base 10000."""

    def __init__(self, rotary_dim: int) -> None:
        super().__init__(rotary_dim, 10000.0, interleaved=True)

    def forward(self, h_q: torch.Tensor, h_k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn queries and keys (..., length, dim_head) by their positions; returns both.

        Keys are at positions 0 on, queries at the last of these.
        """
        return self.rotated(h_q, h_k)


class RotaryEmbeddingESM(Rotary):
    """LLaMA's layout: channel i is paired with channel i + dim / 2.

    Args:
        dim: number of channels that are turned.
        base: ratio of the last pair's wavelength to the first one's.
        distance_scale: positions are multiplied by it.
        dtype: accepted; angles are always fp32.
        scaling: how frequencies are changed for longer sequences, as `rope_scaling` in Hugging Face
            configurations; None for not at all.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000,
        distance_scale: float = 1,
        dtype: torch.dtype = torch.half,
        scaling: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            dim, base, interleaved=False, distance_scale=distance_scale, scaling=scaling
        )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, seq_dim: int = -2
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn `q` and `k` (..., length, dim_head) by their positions; returns both.

        Keys are at positions 0 on, queries at the last of these.

        Raises:
            InputError: for another `seq_dim` than that of the last but one dimension.
        """
        if seq_dim not in {-2, q.dim() - 2}:
            raise InputError(f"seq_dim is {seq_dim}: positions go along the last but one, -2.")
        return self.rotated(q, k)


def check_scaling(scaling: Mapping[str, Any]) -> None:
    """Refuse what `scaled_frequencies` cannot do.

    Raises:
        ConfigError: naming the kind.
    """
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
    }
    if kind not in needed:
        raise ConfigError(
            f"rope scaling {kind!r} is not supported: expected one of {', '.join(needed)}."
        )
    missing = [name for name in needed[kind] if name not in scaling]
    if missing:
        raise ConfigError(f"rope scaling {kind!r} lacks {', '.join(missing)}.")


def scaled_frequencies(frequencies: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Frequencies (pairs,) for sequences longer than those of pre-training.

    "linear" (Chen et al., "Extending Context Window of LLMs via Positional Interpolation", 2023)
    divides all by `factor`. "llama3" (LLaMA 3.1) does so for waves longer than the original context
    over `low_freq_factor`, leaves those shorter than it over `high_freq_factor` alone, and goes
    over smoothly between.
    """
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return frequencies
    slow = frequencies / scaling["factor"]
    if kind == "linear":
        return slow
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    # that fit into the context
    waves = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    share = ((waves - low) / (high - low)).clamp(0, 1)
    return share * frequencies + (1 - share) * slow
