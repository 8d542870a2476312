"""BMTrain's import paths, `from bmtrain.block_layer import Block` for example.

Each file says where its names are defined now. The files are in this folder and not at their import
paths, to keep them apart from the library's own modules. `make_importable` appends this folder to
the package's `__path__`, and its subfolders likewise. A module of the library that has an old path
(`bmtrain.utils`, `bmtrain.optim.adam`, `bmtrain.nn.linear`) comes first and has the old names.
"""

from __future__ import annotations

import importlib
import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent
PACKAGES = ("distributed", "inspect", "loss", "lr_scheduler", "nn", "optim")


def make_importable() -> None:
    """Make this folder's modules importable below `bmtrain`, and set them as its attributes."""
    for name in ("", *PACKAGES):
        package = sys.modules[f"bmtrain.{name}".rstrip(".")]
        folder = str(FOLDER / name)
        if folder not in package.__path__:
            package.__path__.append(folder)
    for name in old_modules():
        parent, _, last = name.rpartition(".")
        names = vars(sys.modules[parent])
        taken = names.get(last)
        module = importlib.import_module(name)
        # The import has replaced an attribute of the same name by the module. Put it back:
        # `bmtrain.synchronize` must stay a function.
        names[last] = module if taken is None else taken


def old_modules() -> list[str]:
    """The import paths of all modules of this folder."""
    files = [path.relative_to(FOLDER).with_suffix("") for path in sorted(FOLDER.rglob("*.py"))]
    return [
        ".".join(("bmtrain", *file.parts))
        for file in files
        if file.name not in ("__init__", "removed")
    ]
