"""Start a program on every GPU of this machine, or on two CPU processes: `launch.py [--nproc N]
PROGRAM [ARGUMENT...]`.

Runs torchrun in this process. Where torchrun would end with a traceback of its own, the ranks have
said already what happened: they were asked to stop, or one of them failed.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main() -> None:
    """Choose the number of processes and become torchrun."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--nproc",
        type=int,
        default=0,
        help="processes to start; 0: one per GPU, or 2 without a GPU",
    )
    parser.add_argument("program", help="the Python file to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the program gets")
    options = parser.parse_args()
    num_gpus = torch.cuda.device_count()
    if options.nproc < 0:
        parser.error(
            f"--nproc {options.nproc}: expected 1 or more, or 0 for one process per GPU (2 "
            "without a GPU)"
        )
    num_processes = options.nproc or num_gpus or 2
    if not num_gpus:
        # Ranks that share few cores lose more by each starting a thread per core than they gain.
        os.environ.setdefault(
            "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes))
        )
    # Where a rank has ended, the others' connections say so in pages of C++, before what matters.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.disable(logging.WARNING)  # of signals, which the user has sent
    try:
        # Behind "--" torchrun does not take an argument of the program for an abbreviation of its
        # own.
        torchrun(
            [
                "--standalone",
                f"--nproc_per_node={num_processes}",
                "--",
                options.program,
                *options.arguments,
            ]
        )
    except SignalException:
        print("launch: interrupted; all processes have ended", file=sys.stderr)
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        # Below 0 are the processes that torchrun stopped because another had failed: what that one
        # says counts.
        sys.exit(max(codes) if max(codes) > 0 else -min(codes))


if __name__ == "__main__":
    main()
