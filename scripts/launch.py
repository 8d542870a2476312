"""Start a program on every GPU of this machine, or on two CPU processes: `launch.py [--nproc N] PROGRAM [ARGUMENT...]`.

Replaces itself by torchrun, so that an interrupt reaches it directly.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch


def main() -> None:
    """Choose the number of processes and become torchrun."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--nproc", type=int, default=0, help="processes to start; 0: one per GPU, or 2 without a GPU")
    parser.add_argument("program", help="the Python file to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the program gets")
    options = parser.parse_args()
    num_gpus = torch.cuda.device_count()
    if options.nproc < 0:
        parser.error(f"--nproc {options.nproc}: expected 1 or more, or 0 for one process per GPU (2 without a GPU)")
    num_processes = options.nproc or num_gpus or 2
    if not num_gpus:
        # Ranks that share few cores lose more by each starting a thread per core than they gain.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
    # Behind "--" torchrun does not take an argument of the program for an abbreviation of its own.
    os.execv(sys.executable, [*torchrun, "--", options.program, *options.arguments])


if __name__ == "__main__":
    main()
