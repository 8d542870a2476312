"""Small helpers for training scripts: a moving average, and printing on rank 0."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Mapping
from typing import Any, SupportsFloat, TextIO

import torch

from bmtrain.distributed.memory import DeviceMemory
from bmtrain.errors import ConfigurationError
from bmtrain.runtime import world
from bmtrain.runtime.log import aligned, print_rank


def round_up(x: int, d: int) -> int:
    """The smallest multiple of `d` that is at least `x`."""
    return -(-x // d) * d


def check_torch_version(version_str: str) -> int:
    """Positive if torch is newer than `version_str`, 0 if equal, negative if older.

    `version_str` is "major.minor.patch"; what follows is ignored.

    Raises:
        ConfigurationError: for a text that is no version.
    """
    numbers = []
    for text in (torch.__version__, version_str):
        found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
        if found is None:
            raise ConfigurationError(
                f"check_torch_version got {text!r}: expected a version such as '1.12.0'."
            )
        major, minor, patch = (int(part or 0) for part in found.groups())
        numbers.append(major * 10000 + minor * 100 + patch)
    return numbers[0] - numbers[1]


def tp_split_tensor(tensor: torch.Tensor, split_dim: int) -> torch.Tensor:
    """A contiguous copy of this tensor-parallel rank's equal part of `tensor` along `split_dim`.

    Raises:
        ConfigurationError: if the dim does not exist or `tp_size` does not divide it.
    """
    axis = world.current("tp_split_tensor").mesh.tp
    if not -tensor.dim() <= split_dim < tensor.dim() or tensor.shape[split_dim] % axis.size:
        raise ConfigurationError(
            f"tp_split_tensor got shape {tuple(tensor.shape)} and split_dim={split_dim}: expected "
            f"a dim that tp_size={axis.size} divides."
        )
    return tensor.chunk(axis.size, dim=split_dim)[axis.index].clone(
        memory_format=torch.contiguous_format
    )


class AverageRecorder:
    """Exponential moving average with the bias correction of Adam (Kingma and Ba, 2015, section 3).

    After values v_1 ... v_t it is `(1 - alpha) sum_i alpha**(t - i) v_i / (1 - alpha**t)`, a
    weighted mean of the recorded values.

    Args:
        alpha: weight of the past, in [0, 1).
        start_value: what `value` returns before the first record; it has no weight afterwards.

    Raises:
        ConfigurationError: `alpha` outside [0, 1).
    """

    def __init__(self, alpha: float = 0.9, start_value: float = 0) -> None:
        if not 0 <= alpha < 1:
            raise ConfigurationError(
                f"alpha: got {alpha}, expected 0 <= alpha < 1; 0.9 averages over about 10 values."
            )
        self.alpha = alpha
        self._start_value = float(start_value)
        self._sum = 0.0
        self._past_weight = 1.0  # alpha**t

    @property
    def value(self) -> float:
        """The average, or `start_value` before the first record."""
        if self._past_weight == 1.0:
            return self._start_value
        return self._sum / (1 - self._past_weight)

    def record(self, v: SupportsFloat) -> None:
        """Add the value `v`: a number, or a tensor with one element."""
        self._sum = self.alpha * self._sum + (1 - self.alpha) * float(v)
        self._past_weight *= self.alpha


def print_block(title: str, content: Any = None, file: TextIO | None = None) -> None:
    """Print `title` in a line and `str(content)` below it, on rank 0, to stdout or `file`."""
    below = () if content is None else (content,)
    print_rank(f"== {title} ==", *below, sep="\n", file=file)


def print_dict(title: str, content: Mapping[Any, Any], file: TextIO | None = None) -> None:
    """`print_block` of a line for each key of `content`."""
    lines = [(str(key), str(value)) for key, value in content.items()]
    print_block(title, aligned(lines), file)


def peak_memory() -> int:
    """Peak bytes of this rank's GPU held by tensors in this run.

    Includes shards that other ranks map. On a CPU, the peak resident set size of the process.
    """
    current = world.current("peak_memory")
    if current.device.type != "cpu":
        return current.service(DeviceMemory).highest()
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, else KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def see_memory(message: str, detail: bool = False) -> None:
    """Print on rank 0 the device memory held by tensors and the peak since the last call, in GiB.

    Includes shards that other ranks map, which torch's own statistics miss. Resets torch's peak
    statistics. On a CPU, prints the peak resident set size of the process.

    Args:
        message: printed before the figures.
        detail: also print torch's memory summary.
    """
    current = world.current("see_memory")
    if current.device.type == "cpu":
        print_rank(f"{message}: peak resident memory {peak_memory() / 2**30:.2f} GiB")
        return
    memory = current.service(DeviceMemory)
    print_rank(
        f"{message}: allocated {memory.held() / 2**30:.2f} GiB, peak "
        f"{memory.shown.take() / 2**30:.2f} GiB"
    )
    if detail:
        print_rank(torch.cuda.memory_summary(current.device))
