"""Run the GPU tests and write benchmarks/results/gpu-tests.json: machine, versions, commit, counts.

    make test-gpu [ARGS="-k optimizer"]

CI has no GPU. The file holds a digest of the sources that run on streams, and `make test` says
where they have changed since. Only a run of all tests writes the file.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from xml.etree import ElementTree

import torch

ROOT = pathlib.Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "gpu-tests.json"
ROOMS = ("shard", "distributed", "optim", "kernels", "compile")
CORES_PER_WORKER = 3  # two ranks and the test
MOST_WORKERS = 10


def digest() -> str:
    """SHA-256 of the sources of ROOMS, by name."""
    found = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((ROOT / "src" / "bmtrain" / room).rglob("*.py")):
            found.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def warning() -> str | None:
    """What a reader should know of the last run of the GPU tests; None if it is of this tree."""
    if not RESULT.exists():
        return f"the GPU tests have no result: {RESULT.relative_to(ROOT)} is missing"
    known = json.loads(RESULT.read_text(encoding="utf-8"))
    if known["digest"] != digest():
        return f"the GPU tests last ran on other sources: commit {known['commit']}"
    return f"the GPU tests failed at this tree: {known['failed']}" if known["failed"] else None


def main() -> int:
    """Run what can run beside other tests on several workers, then the rest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="unknown", help="what is tested, for the file")
    args, more = parser.parse_known_args()
    began = time.monotonic()
    workers = max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // CORES_PER_WORKER))
    parallel = ["-n", str(workers), "--dist=worksteal"] if _has_xdist() and workers > 1 else []
    # Torch makes this folder at first use, and warns where two processes do so at once.
    pathlib.Path.home().joinpath(".cache", "torch", "kernels").mkdir(parents=True, exist_ok=True)
    counts = {"passed": 0, "failed": 0}
    status = 0
    for options in ([*parallel, "-m", "not alone"], ["-m", "alone"]):
        with tempfile.TemporaryDirectory() as folder:
            report = pathlib.Path(folder, "junit.xml")
            command = [sys.executable, "-m", "pytest", "tests/gpu", f"--junitxml={report}"]
            code = subprocess.run([*command, *options, *more], cwd=ROOT, check=False).returncode
            status = status or (0 if more and code == _NO_TESTS else code)
            if report.exists():
                _count(report, counts)
    seconds = round(time.monotonic() - began)
    print(f"GPU tests: {counts['passed']} passed, {counts['failed']} failed in {seconds} s")
    if not more:
        RESULT.write_text(json.dumps(_record(args.commit, counts, seconds), indent=1) + "\n")
    return status


_NO_TESTS = 5  # pytest's exit status


def _has_xdist() -> bool:
    return importlib.util.find_spec("xdist") is not None


def _count(report: pathlib.Path, counts: dict[str, int]) -> None:
    for suite in ElementTree.parse(report).iter("testsuite"):
        failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        counts["failed"] += failed
        counts["passed"] += int(suite.get("tests", 0)) - failed - int(suite.get("skipped", 0))


def _record(commit: str, counts: dict[str, int], seconds: int) -> dict[str, object]:
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "machine": f"{len(names)} x {names[0]}" if names else "no GPU",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        **counts,
        "seconds": seconds,
        "digest": digest(),
    }


if __name__ == "__main__":
    sys.exit(main())
