"""Rules of the house that the syntax tree can show and ruff does not look at (annotations and
docstrings are its own); each is tried on a line that breaks it.
"""

import ast
from collections.abc import Callable, Iterator

import pytest
from tests.arch.source import Module, dotted, modules, parse

Rule = Callable[[Module], Iterator[ast.AST]]


def asserts(module):
    """`assert` vanishes under -O and teaches nobody: raise an error with name, got, expected,
    remedy.
    """
    return (node for node in ast.walk(module.tree) if isinstance(node, ast.Assert))


def global_state(module):
    """`global`: every fact has one owner, handed over by constructor."""
    return (node for node in ast.walk(module.tree) if isinstance(node, ast.Global))


def late_attributes(module):
    """`hasattr` and `setattr`: every attribute exists after `__init__`."""
    return _calls(module, {"hasattr", "setattr"})


def dropped_errors(module):
    """`except ...: pass`: an error caught and dropped."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ExceptHandler) and all(
            isinstance(step, ast.Pass) for step in node.body
        ):
            yield node


def device_names(module):
    """`"cuda"` written out: only runtime/ chooses a device."""
    if module.room == "runtime":
        return
    for node in ast.walk(module.tree):
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if text == "cuda" or text.startswith("cuda:"):
            yield node


def environment(module):
    """`os.environ` or `os.getenv`: runtime/world.py is the sole reader of the environment."""
    if str(module.path) == "bmtrain/runtime/world.py":
        return
    names = {"os.environ", "os.environb", "os.getenv", "os.putenv"}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and dotted(node) in names:
            yield node
        if isinstance(node, ast.ImportFrom) and any(
            f"{node.module}.{alias.name}" in names for alias in node.names
        ):
            yield node


def transport(module):
    """`torch.distributed.x` without an import of it: only runtime/ and distributed/ speak to it."""
    if module.in_bmtrain and module.room in {"runtime", "distributed", "torch_internals"}:
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and dotted(node) == "torch.distributed":
            yield node


def internals(module):
    """What torch does not make public, by a name with an underscore: torch_internals.py is the one
    place that names it.
    """
    if str(module.path) == "bmtrain/torch_internals.py":
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and _is_internal(dotted(node)):
            yield node
        if isinstance(node, ast.Import) and any(_is_internal(alias.name) for alias in node.names):
            yield node
        if isinstance(node, ast.ImportFrom) and any(
            _is_internal(f"{node.module}.{alias.name}") for alias in node.names
        ):
            yield node


def _is_internal(name):
    return name.startswith("torch.") and any(
        part.startswith("_") and not part.endswith("__") for part in name.split(".")
    )


def _calls(module, names):
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and dotted(node.func) in names:
            yield node


# Each rule with lines that break it.
RULES = {
    asserts: ["assert x"],
    global_state: ["def f():\n    global x"],
    late_attributes: ["hasattr(x, 'y')", "setattr(x, 'y', 1)"],
    dropped_errors: ["try:\n    f()\nexcept ValueError:\n    pass"],
    device_names: ["x.to('cuda')", "y = 'cuda:0'"],
    environment: ["os.environ['RANK']", "from os import environ", "os.getenv('RANK')"],
    transport: ["torch.distributed.barrier()"],
    internals: [
        "torch._C._is_tracing()",
        "import torch._dynamo",
        "from torch.utils import _pytree",
        "from torch._ops import OpOverload",
    ],
}


GOOD = """'What it holds.'
class A:
    def f(self, x: int, *y: int) -> str:
        return "cudagraph"
"""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_keeps_the_rule(rule):
    """No file of src/ breaks it. The rule finds what breaks it, as one that cannot fail proves
    nothing, and lets an annotated method of a documented module pass.
    """
    found = [module.where(node, str(rule.__doc__)) for module in modules() for node in rule(module)]
    assert not found, "\n".join(found)
    for line in RULES[rule]:
        assert list(rule(parse(line, "bmtrain/shard/somewhere.py"))), line
    assert not list(rule(parse(GOOD, "bmtrain/shard/somewhere.py")))
