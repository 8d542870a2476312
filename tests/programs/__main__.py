"""`python -m tests.programs SEED...` runs the programs of these seeds; `--count 500` those of the
seeds from `--first` on.
"""

import argparse
import sys
import time
from collections import Counter

from tests.programs.features import draw
from tests.programs.pool import judge


def main():
    """Print a line for each program that is neither right nor refused; exit status 1 if there is
    one.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument("seeds", nargs="*", type=int, help="seeds to run, each described")
    parser.add_argument("--count", type=int, default=0, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--ranks", type=int, default=None, help="1 to 3; by default the seed says")
    parser.add_argument(
        "--shrink", action="store_true", help="find the smallest program that still fails"
    )
    parser.add_argument("--verbose", action="store_true", help="a line for each program")
    args = parser.parse_args()
    seeds = args.seeds or range(args.first, args.first + args.count)
    count = Counter()
    began = time.monotonic()
    for seed in seeds:
        spec = draw(seed, args.ranks)
        verdict = judge(spec)
        count[verdict.word] += 1
        if not verdict or args.verbose or args.seeds:
            print(f"{verdict.word:8s}{seed}: {spec}\n        {verdict.detail[:600]}", flush=True)
        if not verdict and args.shrink:
            small, now = shrunk(spec, verdict)
            print(f"        smallest: {now.word}: {small}\n        {now.detail[:400]}", flush=True)
    print(
        ", ".join(f"{number} {word}" for word, number in sorted(count.items())),
        f"in {time.monotonic() - began:.0f} s",
    )
    return int(any(word not in ("right", "refused") for word in count))


def shrunk(spec, verdict):
    """Take out one thing after the other while the program still fails in the same way."""
    tried = {str(spec)}
    while True:
        for smaller in spec.smaller():
            if str(smaller) in tried:
                continue
            tried.add(str(smaller))
            found = judge(smaller)
            if found.sort == verdict.sort:
                spec, verdict = smaller, found
                break
        else:
            return spec, verdict


if __name__ == "__main__":
    sys.exit(main())
