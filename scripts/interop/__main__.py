"""Compare what OpenDelta and OpenPrompt do on ranks with what they do in one process.

    python -m scripts.interop [--only "automatic"] [--ranks 1 2]

Needs an environment of its own (docs/site/en/reference/interoperability.md). Prints a line for each
combination that is not equal; exit status 1 if one is neither equal nor refused.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from scripts.interop.comparing import Differs, compare_all
from tests.ranks import runner

ROOMS = ("scripts.interop.deltas", "scripts.interop.prompts")


def judge(room: str, numbers: list[int], ranks: int) -> Iterator[tuple[int, str, str]]:
    """(number, verdict, in what words) of these combinations.

    Ranks go on from one to the next until one is not equal, and then begin anew behind it.
    """
    while numbers:
        failed, verdict = -1, ("equal", "")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            try:
                runner.run_ranks(
                    compare_all, ranks, room, numbers, name, timeout=900.0, init={"timeout": 60.0}
                )
            except Exception as error:
                verdict = verdict_of(error)
                at = [path.read_text().split()[-1] for path in folder.glob("at*")]
                failed = min(map(int, at), default=numbers[0])
            plain = folder / "not-in-plain"
            lines = plain.read_text().splitlines() if plain.exists() else []
        unknown = dict(line.split(" ", 1) for line in lines)
        while numbers:
            number = numbers.pop(0)
            if number == failed:
                yield number, *verdict
                break
            if str(number) in unknown:
                yield number, "not in plain", unknown[str(number)]
            else:
                yield number, "equal", ""


def verdict_of(error: Exception) -> tuple[str, str]:
    """What an error says about the combination that raised it."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, Differs):
        return "WRONG", str(error)
    if (
        "threads and open files after the run" in text
    ):  # the packages' own; all was compared by then
        return "equal", ""
    if type(error).__module__ == "bmtrain.errors":
        return "refused", f"{text}\n{error.__cause__ or ''}"
    return "CRASH", f"{text}\n{error.__cause__ or ''}"


def main() -> int:
    """Run the combinations; a line for each that is not equal."""
    parser = argparse.ArgumentParser(prog="python -m scripts.interop", description=__doc__)
    parser.add_argument("--only", default="", help="combinations with all these words")
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--verbose", action="store_true", help="a line for each, and whole traces")
    args = parser.parse_args()
    runner.PRELOADED.extend(["scripts.interop.comparing", *ROOMS])
    count: Counter[str] = Counter()
    began = time.monotonic()
    for ranks, room in itertools.product(args.ranks, ROOMS):
        names = [case.name for case in importlib.import_module(room).CASES]
        chosen = [
            i for i, name in enumerate(names) if all(w in name.split() for w in args.only.split())
        ]
        for number, word, detail in judge(room, chosen, ranks):
            count[word] += 1
            if word != "equal" or args.verbose:
                text = detail if args.verbose else detail[:400].replace("\n", " ")
                print(f"{word:13s}{names[number]}, {ranks} ranks: {text}", flush=True)
    print(", ".join(f"{number} {word}" for word, number in sorted(count.items())))
    print(f"in {time.monotonic() - began:.0f} s")
    return int(bool(count["WRONG"] + count["CRASH"]))


if __name__ == "__main__":
    sys.exit(main())
