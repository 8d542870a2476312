"""`python -m model_center COMMAND`: train models, prepare their data, use the results."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. See `commands.command_line`.

    `plan` says something before the packages are imported, which takes seconds.
    """
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    if words[:1] == ["plan"]:
        print("plan: a step without memory ...", file=sys.stderr, flush=True)
    status: int = importlib.import_module("model_center.commands.command_line").main(words)
    return status


if __name__ == "__main__":
    sys.exit(main())
