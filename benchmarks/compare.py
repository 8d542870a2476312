r"""Run several backends on the same machine one after another and write one JSON file with machine, versions and commit.

python benchmarks/compare.py --gpus 4 --name 13b --commit $(git rev-parse HEAD) \
    --run "--backend fsdp2 --shape 13b --batch 8 24 --compile --recompute" \
    --run "--backend bmtrain --shape 13b --batch 8 24 --compile"
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import platform
import shlex
import subprocess
import sys
import tempfile

import torch

HERE = pathlib.Path(__file__).parent


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    return {
        "gpu": torch.cuda.get_device_name(), "num_gpus": torch.cuda.device_count(), "cpu": platform.machine(),
        "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }  # fmt: skip


def run(arguments: str, gpus: int) -> list[dict[str, object]]:
    """The records of one backend."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as out:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}", str(HERE / "throughput.py"),
            *shlex.split(arguments), "--out", out.name,
        ]  # fmt: skip
        subprocess.run(command, check=False)
        return [json.loads(line) for line in pathlib.Path(out.name).read_text().splitlines()]


def main() -> None:
    """Measure all runs and save them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--run", action="append", required=True, help="arguments of throughput.py")
    parser.add_argument("--name", required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--folder", default=str(HERE / "results"))
    args = parser.parse_args()
    said = sys.argv.copy()
    if "--folder" in said:  # where the file lies is no part of how it was made
        place = said.index("--folder")
        del said[place : place + 2]
    records = [record for arguments in args.run for record in run(arguments, args.gpus)]
    report = {
        "date": datetime.date.today().isoformat(), "commit": args.commit, "command": shlex.join(said), "machine": machine(),
        "records": records,
    }  # fmt: skip
    path = pathlib.Path(args.folder) / f"{args.name}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
