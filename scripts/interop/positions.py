"""What functions of a package take in its releases: `python .../positions.py FOLDER ...`.

The folders are those of the package, with its __init__.py, one a release, from the oldest on. A
line for each function, method and constructor: its path below the package, and its arguments in
their order; a form of a later release follows after `|`, unless it only has more arguments than the
one before. Private functions, those of autograd and of other releases' insides are left out, as
are arguments by name alone. Nothing is executed. Those of BMTrain's and ModelCenter's published
packages are in `tests/unit/positions.txt`.
"""

from __future__ import annotations

import argparse
import ast
import pathlib
from collections.abc import Iterator


def functions(body: list[ast.stmt], path: str) -> Iterator[tuple[str, list[str]]]:
    """Paths and arguments of the public functions of a module, and of those of its classes."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            for name, arguments in functions(node.body, f"{path}.{node.name}"):
                if arguments[:1] != ["ctx"]:
                    yield name.removesuffix(".__init__").removesuffix(".__new__"), arguments
        elif isinstance(node, ast.FunctionDef):
            marks = {ast.unparse(mark) for mark in node.decorator_list}
            is_public = not node.name.startswith("_") or node.name in {"__init__", "__new__"}
            if is_public and "property" not in marks:
                arguments = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
                is_bound = arguments[:1] in (["self"], ["cls"])
                yield f"{path}.{node.name}", arguments[is_bound:]


def main() -> None:
    """Print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, nargs="+", help="of the package")
    found: dict[str, list[list[str]]] = {}
    for folder in parser.parse_args().folder:
        for file in sorted(folder.rglob("*.py")):
            path = ".".join(file.relative_to(folder.parent).with_suffix("").parts)
            body = ast.parse(file.read_text(encoding="utf-8")).body
            for name, arguments in functions(body, path.removesuffix(".__init__")):
                forms = found.setdefault(name, [])
                if forms and arguments[: len(forms[-1])] == forms[-1]:
                    forms.pop()
                if arguments not in forms:
                    forms.append(arguments)
    for name, forms in sorted(found.items()):
        if any(forms):
            print(f"{name}:", " | ".join(map(" ".join, forms)))


if __name__ == "__main__":
    main()
