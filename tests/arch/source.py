"""The source as syntax trees, and small questions about them, for the tests of this folder.

Nothing is imported.
"""

import ast
import dataclasses
import functools
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ("bmtrain", "model_center")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Import:
    """One imported module: `module` is absolute, `line` where it stands, `late` if it is not at the
    top of its file.
    """

    module: str
    line: int
    late: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
    """One file of `src/`: its path from there, and its tree."""

    path: pathlib.PurePosixPath
    text: str
    tree: ast.Module

    @property
    def room(self):
        """First name below the package: a folder (`shard`) or the stem of a file (`errors`,
        `__init__`).
        """
        return pathlib.PurePosixPath(self.path.parts[1]).stem

    @property
    def in_bmtrain(self):
        """Whether the file belongs to `bmtrain` rather than `model_center`."""
        return self.path.parts[0] == "bmtrain"

    def where(self, node, what):
        """`path:line: what`, as editors understand it."""
        line = node.line if isinstance(node, Import) else getattr(node, "lineno", 1)
        return f"src/{self.path}:{line}: {what}"

    def imports(self):
        """Every imported module; `from a import b` is `a.b` where that is a file or folder of
        `src/`, else `a`.
        """
        top = set(map(id, self.tree.body))
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = "." * node.level + (node.module or "")
                names = [
                    f"{base}.{alias.name}" if is_module(f"{base}.{alias.name}") else base
                    for alias in node.names
                ]
            else:
                continue
            for name in dict.fromkeys(names):
                yield Import(module=name, line=node.lineno, late=id(node) not in top)


def is_module(name):
    """Whether this dotted name is a file or folder of `src/`."""
    path = ROOT / "src" / name.replace(".", "/")
    return not name.startswith(".") and (path.is_dir() or path.with_suffix(".py").is_file())


def parse(text, path="bmtrain/somewhere.py"):
    """A module from its text; `path` is relative to `src/`."""
    return Module(path=pathlib.PurePosixPath(path), text=text, tree=ast.parse(text))


@functools.cache
def modules():
    """Every Python file of the packages in `src/`."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / "src" / package).rglob("*.py")):
            found.append(parse(path.read_text("utf-8"), path.relative_to(ROOT / "src").as_posix()))
    return tuple(found)


def dotted(node):
    """`a.b.c` of a chain of attributes; empty for anything else."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name) if dotted(value):
            return f"{dotted(value)}.{name}"
        case _:
            return ""


def within(name, *packages):
    """Whether a dotted module name is one of these packages or lies below one."""
    return any(name == package or name.startswith(package + ".") for package in packages)
