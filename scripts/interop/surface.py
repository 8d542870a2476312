"""The names that the modules of a package bind: `python scripts/interop/surface.py FOLDER`.

A line for each module: its path below the package, and the names that it defines or imports from
its own package. What comes from elsewhere (torch, typing) is left out. Nothing is executed. The
names of BMTrain's and ModelCenter's published packages are in `tests/unit/surface.txt`.
"""

from __future__ import annotations

import argparse
import ast
import pathlib
from collections.abc import Iterable, Iterator

FOREIGN = ("C",)  # compiled


def bound(body: Iterable[ast.stmt], package: str, around: list[str]) -> Iterator[str]:
    """The names that statements of the module in `around` (a package's path) bind; `*module` for
    all names of a module.
    """
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            found = (x for target in node.targets for x in ast.walk(target))
            yield from (x.id for x in found if isinstance(x, ast.Name))
        elif isinstance(node, ast.ImportFrom):
            above = around[: len(around) - node.level + 1] if node.level else []
            source = [*above, *(node.module or "").split(".")]
            if node.level or source[0] == package:
                for alias in node.names:
                    star = "*" + ".".join(filter(None, source)).removeprefix(f"{package}.")
                    yield star if alias.name == "*" else alias.asname or alias.name
        elif isinstance(node, ast.If | ast.Try):
            yield from bound([*node.body, *node.orelse], package, around)


def surface(folder: pathlib.Path) -> dict[str, list[str]]:
    """By the path of a module below the package: its names, sorted."""
    raw = {}
    for file in sorted(folder.rglob("*.py")):
        path = [*file.relative_to(folder).with_suffix("").parts]
        is_package = path[-1] == "__init__"
        path = path[:-1] if is_package else path
        around = [folder.name, *(path if is_package else path[:-1])]
        body = ast.parse(file.read_text(encoding="utf-8")).body
        raw[".".join(path)] = set(bound(body, folder.name, around)) - set(FOREIGN)
    for _ in raw:  # names of names, to the end
        for path, names in raw.items():
            stars = {name for name in names if name.startswith("*")}
            public = (x for star in stars for x in raw[star[1:]] if not x.startswith("_"))
            raw[path] = (names - stars) | set(public)
    return {path: sorted(names) for path, names in raw.items() if names}


def main() -> None:
    """Print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="of the package, with its __init__.py")
    for path, names in surface(parser.parse_args().folder).items():
        print(f"{path}: {' '.join(names)}")


if __name__ == "__main__":
    main()
