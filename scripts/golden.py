"""What random programs compute, to the bit, and what their ranks do together, to the letter.

    python -m scripts.golden write FILE [--count 120]
    python -m scripts.golden compare FILE

For a change of form: run `write` before it and `compare` after it. `compare` names each program
whose values or sequence of collectives are others.
"""

import argparse
import difflib
import hashlib
import json
import pathlib
import pickle
import sys
import warnings
from typing import Any

from tests.programs import modules, running
from tests.programs.features import Spec, draw
from tests.ranks import runner

import bmtrain as bmt
from bmtrain.distributed.ledger import Ledger
from bmtrain.runtime import world


def trace(spec: Spec) -> tuple[str, list[str]]:
    """This rank's values as a digest, or its error, and the lines of its ledger."""
    warnings.simplefilter("ignore")
    bmt.init_distributed(device="cpu", zero_level=spec["level"], timeout=20)
    world.current("a program").draws.same_rows = spec["rows"] == "same"
    lines: list[str] = []
    note = Ledger.note

    def listen(self: Ledger, axis: Any, what: str) -> None:
        lines.append(what)
        note(self, axis, what)

    modules.UnusedOnOneRank.is_unused = spec.ranks > 1 and bmt.rank() == 0
    Ledger.note = listen  # type: ignore[method-assign]
    try:
        record = running.run(spec, running.Sharded(spec, modules.sharded(spec)))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}", lines
    finally:
        Ledger.note = note  # type: ignore[method-assign]
    found = hashlib.sha256()
    for key, value in record.values.items():
        found.update(repr(key).encode())
        found.update(
            b""
            if value is None
            else value.contiguous().view(-1).numpy().tobytes()
            if value.dtype.is_floating_point and value.dtype.itemsize > 2
            else repr(value.tolist()).encode()
        )
    return found.hexdigest(), lines


def main() -> int:
    """Exit status 1 if a program computes otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=("write", "compare"))
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--count", type=int, default=120)
    args = parser.parse_args()
    known = json.loads(args.file.read_text()) if args.verb == "compare" else {}
    found: dict[str, Any] = {}
    num_other = 0
    for seed in map(int, known) if known else range(args.count):
        spec = draw(seed)
        outcomes, _ = runner.perform(trace, spec.ranks, spec, timeout=40.0, init=None, fresh=False)
        told = {o.rank: pickle.loads(o.value) if not o.trace else ("crash", []) for o in outcomes}
        if len(told) < spec.ranks or any(kind == "crash" for kind, _ in told.values()):
            runner.POOL.close()
        found[str(seed)] = [told.get(rank) for rank in range(spec.ranks)]
        if known and json.loads(json.dumps(found[str(seed)])) != known[str(seed)]:
            num_other += 1
            before, after = known[str(seed)], found[str(seed)]
            values = [b and a and b[0] == a[0] for b, a in zip(before, after, strict=True)]
            print(f"{seed}: values {'same' if all(values) else 'OTHER'} {spec}")
            if not all(values):
                print("   ", before[0] and before[0][0][:150], "->", after[0] and after[0][0][:150])
            lines = difflib.unified_diff(before[0][1], after[0][1], n=0, lineterm="")
            print("\n".join([f"    {line}" for line in lines if line[:1] in "+-"][2:8]))
    if args.verb == "write":
        args.file.write_text(json.dumps(found))
    print(f"{len(found)} programs, {num_other} other")
    runner.POOL.close()
    return 1 if num_other else 0


if __name__ == "__main__":
    sys.exit(main())
