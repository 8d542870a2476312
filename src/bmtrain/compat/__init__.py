"""BMTrain's import paths: `from bmtrain.block_layer import Block` and the like. Each file says
where its things live now.

The files lie here and not where their names say, so that what old programs import does not stand
between what there is. `make_importable` puts this folder behind the package's own on its
`__path__`, its subfolders likewise; where a module of an old name exists anyway (`bmtrain.utils`,
`bmtrain.optim.adam`, `bmtrain.nn.linear`), that one is found first and has the old names.
"""

from __future__ import annotations

import importlib
import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent
PACKAGES = ("distributed", "inspect", "loss", "lr_scheduler", "nn", "optim")


def make_importable() -> None:
    """Let the modules of this folder be found below `bmtrain`, and import them: they are attributes
    of it, as in BMTrain.
    """
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
        # The import has put the module there: but `bmtrain.synchronize()` is a function, and stays
        # one.
        names[last] = module if taken is None else taken


def old_modules() -> list[str]:
    """Dotted names of all modules of this folder, as old programs call them."""
    files = [path.relative_to(FOLDER).with_suffix("") for path in sorted(FOLDER.rglob("*.py"))]
    return [
        ".".join(("bmtrain", *file.parts))
        for file in files
        if file.name not in ("__init__", "removed")
    ]
