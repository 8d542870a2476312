"""A forecast beside what a run measured, once, without holding the run up."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from bmtrain.runtime import world
from bmtrain.runtime.world import environment

GIB = 2**30


def line(forecast: int, measured: int) -> str:
    """Both in GiB, and how much more was measured; arguments in bytes."""
    more = measured / forecast - 1
    return f"memory: {forecast / GIB:.1f} GiB forecast, {measured / GIB:.1f} measured ({more:+.1%})"


def in_use(device: torch.device) -> int:
    """Bytes of a GPU that are in use, by all that runs on it."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


class Comparison:
    """A forecast by a process of its own, which sees no GPU, and one line when it is there.

    A run goes on meanwhile: tracing a model takes some seconds of one core.

    Args:
        words: of the command, behind `python -m`; it is asked for JSON.
    """

    def __init__(self, words: Sequence[str]) -> None:
        hidden = {**environment(), "CUDA_VISIBLE_DEVICES": ""}
        # Files, not pipes: nobody reads before the end, and a full pipe would stop the process.
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `close`)
        self._error = tempfile.TemporaryFile("w+")  # noqa: SIM115 (likewise)
        self._process: subprocess.Popen[str] | None = subprocess.Popen(
            [sys.executable, "-m", *words, "--json"],
            stdout=self._out,
            stderr=self._error,
            stdin=subprocess.DEVNULL,
            text=True,
            env=hidden,
        )

    def said(self, measured: int) -> str | None:
        """The line, the first time that it is asked for after the forecast is there; else None.

        Args:
            measured: bytes in use.
        """
        if self._process is None or self._process.poll() is None:
            return None
        self._process = None
        self._out.seek(0)
        self._error.seek(0)
        out, error = self._out.read(), self._error.read().strip()
        self.close()
        try:
            found: dict[str, Any] = json.loads(out)
        except json.JSONDecodeError:
            reason = error.splitlines()[-1] if error else "it printed nothing"
            return f"memory: {measured / GIB:.1f} GiB in use; no forecast: {reason}"
        return line(int(found["peak_bytes"]), measured)

    def close(self) -> None:
        """End a forecast that nobody waits for any more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._out.close()
        self._error.close()


class Foreseen:
    """The forecast of a run, told once beside what the GPU holds by then.

    Nothing on a CPU and on other ranks than the first.

    Args:
        words: of the command, behind `python -m`, without the machine.
    """

    def __init__(self, words: Sequence[str]) -> None:
        run = world.current("Foreseen")
        self._device = run.device
        is_told = run.device.type != "cpu" and run.rank == 0
        self._comparison = Comparison([*words, *_machine(run), "--brief"]) if is_told else None

    def __enter__(self) -> Foreseen:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._comparison is not None:
            self._comparison.close()
            self._comparison = None

    def tell(self, say: Callable[[str], None]) -> None:
        """Hand the line to `say` as soon as it is there. Call it after each step."""
        if self._comparison is not None:
            said = self._comparison.said(in_use(self._device))
            if said is not None:
                self._comparison = None
                say(said)


def _machine(run: world.World) -> list[str]:
    _, total = torch.cuda.mem_get_info(run.device)
    return [
        *("--gpu-memory", f"{total / GIB:.2f}", "--gpus", str(run.local_size)),
        *("--hosts", str(run.world_size // run.local_size)),
    ]
