"""Imports point down the table of docs/architecture.md or stay in a folder: absolute, at the top,
not to the root.
"""

import pytest
from tests.arch.source import modules, parse, within

LAYERS = (
    {"errors", "version", "torch_internals"},
    {"runtime"},
    {"kernels"},
    {"distributed"},
    {"shard"},
    {"loss", "recompute"},
    {"compile"},
    {"block", "nn", "optim", "lr_scheduler", "inspect", "benchmark", "utils"},
    {"parallel", "checkpoint"},
    {"compat", "plan", "verification"},
    {"__init__", "__main__"},
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
MODEL_CENTER_LAYERS = (
    {"errors", "optional", "version"},
    {"hub", "kernels", "plan"},
    {"config"},
    {"layer"},
    {"weights"},
    {"model"},
    {"tokenizer"},
    {"dataset", "metrics"},
    {"generation"},
    {"arguments", "compat", "convert", "preprocess", "training", "utils"},
    {"commands", "tools"},
    {"__init__", "__main__"},
)
MODEL_CENTER_LEVEL = {
    room: level for level, rooms in enumerate(MODEL_CENTER_LAYERS) for room in rooms
}

# Who may call torch.distributed: the start of the process group and the one room of collectives.
TRANSPORT = {"runtime", "distributed", "torch_internals"}
# Folders of this repository that are no part of the packages.
OUTSIDE = ("examples", "tests", "benchmarks", "scripts")


def offences(module):
    """Every import of `module` that breaks a rule, with the rule."""
    return [
        module.where(imported, f"imports {imported.module}: {rule}")
        for imported in module.imports()
        if (rule := _broken_rule(module, imported.module, imported.late))
    ]


def _broken_rule(module, name, late):
    if name.startswith("."):
        return "write the absolute name"
    if within(name, *OUTSIDE):
        return "the packages know nothing of the repository around them"
    if within(name, "triton"):
        is_launcher = str(module.path) == "bmtrain/kernels/launch.py"
        return "" if is_launcher else "kernels/launch.py alone imports Triton"
    if not module.in_bmtrain:
        if late:
            return "import at the top of the file"
        return (
            _wrong_direction(module.room, name, "model_center", MODEL_CENTER_LEVEL)
            if within(name, "model_center")
            else ""
        )
    if within(name, "model_center"):
        return "bmtrain never imports model_center"
    if late:
        return "import at the top of the file, not late, conditionally or under TYPE_CHECKING"
    if within(name, "torch.distributed") and module.room not in TRANSPORT:
        return "only runtime/ and distributed/ speak to torch.distributed"
    return _wrong_direction(module.room, name, "bmtrain", LEVEL) if within(name, "bmtrain") else ""


def _wrong_direction(room, name, package, level):
    if name == package:
        return "name the module, not the package root"
    target = name.split(".")[1]
    if target == room:
        return ""
    if target not in level:
        return f"{target} has no place in the layer table"
    if level[target] >= level[room]:
        return f"{room} may not look up or sideways at {target}"
    return ""


def test_imports_keep_the_rules():
    """No import of any file breaks a rule."""
    found = [offence for module in modules() for offence in offences(module)]
    assert not found, "\n".join(found)


def test_every_room_has_a_layer():
    """A new folder or file must be given its place in the table."""
    rooms = {(module.in_bmtrain, module.room) for module in modules()}
    table = {(True, room) for room in LEVEL} | {(False, room) for room in MODEL_CENTER_LEVEL}
    assert rooms <= table, f"not in the layer table: {sorted(rooms - table)}"


# The line, as it would stand in a file; what is said of it, nothing of a good one.
LINES = [
    ("bmtrain/shard/a.py", "from bmtrain.optim.adam import Adam", "up or sideways"),
    ("bmtrain/kernels/a.py", "import bmtrain.distributed.collectives", "up or sideways"),
    ("bmtrain/loss/a.py", "from bmtrain.optim import adam", "up or sideways"),
    ("bmtrain/errors.py", "from bmtrain.version import __version__", "up or sideways"),
    ("bmtrain/block/a.py", "from bmtrain import init_distributed", "package root"),
    ("bmtrain/block/a.py", "from .schedule import order", "absolute"),
    ("bmtrain/block/a.py", "def f():\n    import math", "late"),
    (
        "bmtrain/block/a.py",
        "if TYPE_CHECKING:\n    from bmtrain.shard.storage import Storage",
        "TYPE_CHECKING",
    ),
    ("bmtrain/shard/a.py", "import torch.distributed as dist", "torch.distributed"),
    ("bmtrain/shard/a.py", "import triton", "Triton"),
    ("bmtrain/kernels/a.py", "def f():\n    import triton", "Triton"),
    ("bmtrain/shard/a.py", "import model_center", "never imports"),
    ("bmtrain/shard/a.py", "import examples.minimal", "around them"),
    ("bmtrain/shard/a.py", "from bmtrain.misc import thing", "no place"),
    ("model_center/layer/a.py", "from model_center.model.bert import Bert", "up or sideways"),
    ("model_center/layer/a.py", "def f():\n    import math", "top of the file"),
    ("model_center/model/a.py", "from model_center import get_args", "package root"),
    ("bmtrain/shard/a.py", "from bmtrain.distributed.collectives import gather", ""),
    ("bmtrain/shard/a.py", "from bmtrain.shard.layout import Layout", ""),
    ("bmtrain/kernels/launch.py", "def f():\n    import triton", ""),
    ("bmtrain/runtime/a.py", "import torch.distributed as dist", ""),
    ("bmtrain/__init__.py", "from bmtrain.optim.manager import OptimManager", ""),
    ("model_center/model/a.py", "import bmtrain as bmt", ""),
    ("model_center/model/a.py", "from model_center.layer.linear import Linear", ""),
]


@pytest.mark.parametrize(("path", "line", "complaint"), LINES)
def test_bad_imports_are_found(path, line, complaint):
    """Each rule does fail on what it forbids, and lets pass what the table allows."""
    found = "".join(offences(parse(line, path)))
    assert complaint in found and bool(found) == bool(complaint)
