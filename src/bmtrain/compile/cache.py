"""What torch's caches of compiled code are told of this package.

A second start of a program then compiles nothing, and a start with another version of this package
uses none of the code that was compiled for this one. torch identifies a graph by its text, in which
functions and operators stand by name; what they compute is in the sources of this package, whose
hash is added. torch adds one of its own sources likewise.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib

import torch

from bmtrain.compile import fp8, fusions
from bmtrain.compile.graph import calls, parts
from bmtrain.kernels.gelu import gelu
from bmtrain.torch_internals import (
    CACHEABLE,
    CONTEXT_FN,
    call_of_autograd_function,
    inductor_config,
)
from bmtrain.version import __version__

# Functions that rewriting puts into graphs. torch traces into them only after a miss.
_OURS = (fusions.layer_norm, fusions.rms_norm, fusions.linear_gelu, gelu, fp8.linear)


@functools.cache
def sources() -> str:
    """A hash of the source files of this package."""
    folder = pathlib.Path(__file__).parents[1]
    found = hashlib.sha256(__version__.encode())
    for path in sorted(folder.rglob("*.py")):
        found.update(path.relative_to(folder).as_posix().encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def cacheable(graph: torch.fx.GraphModule, marked: dict[str, str]) -> dict[str, str]:
    """Names of functions in graphs that torch may cache, each with what it adds to the key.

    One is torch's: the call of an autograd function. Both of its passes are parts of the graph.

    Args:
        marked: what the program itself has marked for this graph.
    """
    names = [f"{function.__module__}.{function.__name__}" for function in _OURS]
    # Up to torch 2.10 the key does not say whether a recomputed part keeps some of its results.
    levels = "".join("01"[part.meta.get(CONTEXT_FN) is not None] for part in parts(graph))
    key = f"bmtrain {sources()} {levels}"
    names.append(call_of_autograd_function())
    return {**getattr(inductor_config(), CACHEABLE), **marked, **dict.fromkeys(names, key)}


def is_told(graph: torch.fx.GraphModule) -> bool:
    """Whether the key of a graph changes with all that the graph calls.

    It does not change with the source of a function of the program's that stands in the graph by
    name. torch caches no such graph, but looks for such calls in the graph alone and not in its
    parts: after an edit of the function, the program would run what it was before.
    """
    modules = (getattr(node.target, "__module__", None) for node in calls(graph))
    return all(name is None or name.partition(".")[0] in _TOLD for name in modules)


# Packages whose functions are the same for the same key: torch's, ours and Python's own.
_TOLD = ("torch", "bmtrain", "_operator", "builtins", "math")
