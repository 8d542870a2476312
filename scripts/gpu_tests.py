"""Run the GPU tests and write benchmarks/results/gpu-tests.json: machine, versions, commit, counts.

    make test-gpu [ARGS="-k optimizer"]
    make test-gpu ARGS=--again

CI has no GPU. The file holds a digest of the sources that run on streams, and `make test` says
where they have changed since. Only a run of all tests writes the file; `--again` runs those that
failed in it once more, of the same sources, and brings the file up to date.
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
ROOMS = ("block", "shard", "distributed", "optim", "kernels", "compile", "recompute")
CORES_PER_WORKER = 3  # two ranks and the test
MOST_PER_GPU = 5  # workers


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
    parser.add_argument("--again", action="store_true", help="only the tests that failed")
    args, more = parser.parse_known_args()
    began = time.monotonic()
    known = json.loads(RESULT.read_text(encoding="utf-8")) if args.again else {}
    if args.again and known["digest"] != digest():
        parser.error("the sources have changed since: run all tests")
    workers = max(
        1, min(MOST_PER_GPU * torch.cuda.device_count(), (os.cpu_count() or 1) // CORES_PER_WORKER)
    )
    parallel = ["-n", str(workers), "--dist=worksteal"] if _has_xdist() and workers > 1 else []
    # Torch makes this folder at first use, and warns where two processes do so at once.
    pathlib.Path.home().joinpath(".cache", "torch", "kernels").mkdir(parents=True, exist_ok=True)
    failures: list[str] = []
    passed, status = 0, 0
    for options in ([*parallel, "-m", "not alone"], ["-m", "alone"]):
        with tempfile.TemporaryDirectory() as folder:
            report = pathlib.Path(folder, "junit.xml")
            tests = known.get("failures", ["tests/gpu"])
            command = [sys.executable, "-m", "pytest", *tests, f"--junitxml={report}"]
            code = subprocess.run([*command, *options, *more], cwd=ROOT, check=False).returncode
            status = status or (0 if (more or known) and code == _NO_TESTS else code)
            if report.exists():
                passed += _count(report, failures)
    seconds = round(time.monotonic() - began)
    print(f"GPU tests: {passed} passed, {len(failures)} failed in {seconds} s")
    if not more:
        record = _record(args.commit, passed + known.get("passed", 0), failures, seconds)
        if known:
            again = {"commit": args.commit, "passed": passed, "seconds": seconds}
            record |= {key: known[key] for key in ("commit", "date", "seconds")} | {"again": again}
        RESULT.write_text(json.dumps(record, indent=1) + "\n")
    return status


_NO_TESTS = 5  # pytest's exit status


def _has_xdist() -> bool:
    return importlib.util.find_spec("xdist") is not None


def _count(report: pathlib.Path, failures: list[str]) -> int:
    """The number of tests that passed; the names of others go to `failures`."""
    passed = 0
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failures.append(f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}")
        elif case.find("skipped") is None:
            passed += 1
    return passed


def _record(commit: str, passed: int, failures: list[str], seconds: int) -> dict[str, object]:
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "machine": f"{len(names)} x {names[0]}" if names else "no GPU",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "passed": passed,
        "failed": len(failures),
        "failures": failures,
        "seconds": seconds,
        "digest": digest(),
    }


if __name__ == "__main__":
    sys.exit(main())
