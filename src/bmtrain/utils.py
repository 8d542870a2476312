"""Small helpers of training scripts: a moving average, and print-outs on rank 0."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Mapping
from typing import Any, NoReturn, SupportsFloat, TextIO

import rich.box
import rich.console
import rich.panel
import rich.table
import rich.text
import torch

from bmtrain.distributed.memory import DeviceMemory
from bmtrain.errors import ConfigurationError, RemovedError
from bmtrain.runtime import world
from bmtrain.runtime.log import print_rank


def round_up(x: int, d: int) -> int:
    """The smallest multiple of `d` that is at least `x`."""
    return -(-x // d) * d


def check_torch_version(version_str: str) -> int:
    """Above 0 where torch is newer than "major.minor.patch", 0 where it is that version, below 0
    where it is older.
    """
    ours, theirs = (_version_number(text) for text in (torch.__version__, version_str))
    return ours - theirs


def tp_split_tensor(tensor: torch.Tensor, split_dim: int) -> torch.Tensor:
    """This tensor-parallel rank's equal part of `tensor` along `split_dim`, a copy.

    Raises:
        ConfigurationError: a dim that the tensor does not have or the ranks do not divide.
    """
    axis = world.current("tp_split_tensor").mesh.tp
    if not -tensor.dim() <= split_dim < tensor.dim() or tensor.shape[split_dim] % axis.size:
        raise ConfigurationError(
            f"tp_split_tensor got shape {tuple(tensor.shape)} and "
            f"split_dim={split_dim}: expected a dim that tp_size={axis.size} "
            "divides."
        )
    return tensor.chunk(axis.size, dim=split_dim)[axis.index].clone(
        memory_format=torch.contiguous_format
    )


def load_nccl_pypi() -> NoReturn:
    """RemovedError: torch brings its NCCL along."""
    raise RemovedError(
        "bmtrain.utils.load_nccl_pypi",
        "torch.distributed brings its NCCL along; leave the call out.",
    )


class AverageRecorder:
    """Exponential moving average with the bias correction of Adam (Kingma and Ba, 2015, section 3).

    After values v_1 ... v_t it is `(1 - alpha) sum_i alpha**(t - i) v_i / (1 - alpha**t)`: a
    weighted mean of what was recorded. `start_value` is what `value` says before the first record;
    from then on it has no weight.

    Args:
        alpha: weight of the past, in [0, 1).
        start_value: the value before anything is recorded.

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
        """Take in one more value: a number, or a tensor with one element."""
        self._sum = self.alpha * self._sum + (1 - self.alpha) * float(v)
        self._past_weight *= self.alpha


def print_block(title: str, content: Any = None, file: TextIO | None = None) -> None:
    """Print on rank 0 a line with `title` and under it `content`, if any, as it prints itself; to
    stdout or `file`.
    """
    heading = rich.text.Text(title)
    if content is None:
        _print(rich.panel.Panel(heading, box=rich.box.HORIZONTALS), file)
    else:
        _print(
            rich.panel.Panel(rich.text.Text(str(content)), box=rich.box.HORIZONTALS, title=heading),
            file,
        )


def print_dict(title: str, content: Mapping[Any, Any], file: TextIO | None = None) -> None:
    """Print on rank 0 a line with `title` and under it the keys and values of `content`; to stdout
    or `file`.
    """
    table = rich.table.Table.grid(padding=(0, 2))
    for key, value in content.items():
        table.add_row(rich.text.Text(str(key)), rich.text.Text(str(value)))
    _print(rich.panel.Panel(table, box=rich.box.HORIZONTALS, title=rich.text.Text(title)), file)


def peak_memory() -> int:
    """Bytes: the most that tensors on this rank's GPU have held in this run, shards that other
    ranks map included.

    On a CPU the most that has been resident of the process.
    """
    current = world.current("peak_memory")
    if current.device.type != "cpu":
        return current.service(DeviceMemory).highest()
    unit = 1 if sys.platform == "darwin" else 1024  # of what the system tells
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def see_memory(message: str, detail: bool = False) -> None:
    """Print on rank 0 the device memory that tensors hold and the most they have held since the
    last call (GiB).

    Shards count, also those that other ranks map, of which torch's own statistics do not know.
    `detail` adds torch's full table. Torch's peak statistics start anew. On a CPU the resident set
    of the process is shown.
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


def _version_number(text: str) -> int:
    """Of "2.8.0+cpu" 20800."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    if found is None:
        raise ConfigurationError(
            f"check_torch_version got {text!r}: expected a version such as '1.12.0'."
        )
    major, minor, patch = (int(part or 0) for part in found.groups())
    return major * 10000 + minor * 100 + patch


def _print(what: rich.console.RenderableType, file: TextIO | None) -> None:
    if world.rank() == 0:
        rich.console.Console(file=file).print(what)
