"""What docs/architecture.md says of the source, as far as a program can check it."""

import ast
import re

from tests.arch.source import ROOT, modules, within
from tests.arch.test_imports import LAYERS, MODEL_CENTER_LAYERS

TEXT = (ROOT / "docs" / "architecture.md").read_text("utf-8")
CODE = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL))
FOLDERS = ("", "src", "src/bmtrain", "src/model_center")


def tables(text):
    """The fenced blocks of rooms, in layers from the lowest to the highest."""
    blocks = re.findall(r"```text\n([a-z_, <\n]+<[a-z_, <\n]+)```", text)
    return [[set(re.findall(r"\w+", layer)) for layer in block.split("<")] for block in blocks]


def test_every_file_that_is_named_exists():
    """By its path from the root of the repository, of the sources or of a package."""
    paths = [name for name in CODE if re.fullmatch(r"[\w.]+(/[\w.]*)+", name)]
    assert len(paths) > 30
    assert not [path for path in paths if not any((ROOT / f / path).exists() for f in FOLDERS)]


def test_every_name_exists():
    """Classes and their methods."""
    defined = set()
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                inside = [x.name for x in node.body if isinstance(x, ast.FunctionDef)]
                defined |= {node.name, *(f"{node.name}.{name}" for name in inside)}
    names = [name for name in CODE if re.fullmatch(r"[A-Z][a-z]\w+(\.\w+)?", name)]
    assert len(names) > 8
    assert not set(names) - defined


def test_the_layers_are_those_that_imports_keep():
    """In order; the page has at most 150 lines."""
    agents = (ROOT / "AGENTS.md").read_text("utf-8")
    for text in (TEXT, agents):
        assert tables(text) == [[*map(set, LAYERS)], [*map(set, MODEL_CENTER_LAYERS)]]
    assert len(TEXT.splitlines()) <= 150


def of_room(name):
    return [module for module in modules() if str(module.path).startswith(name)]


def test_kernels_stand_beside_the_same_arithmetic():
    """In one file; that of the largest number is torch's own `argmax`."""
    files = [*of_room("bmtrain/kernels/"), *of_room("model_center/kernels/")]
    names = {
        module.path.stem: [x.name for x in module.tree.body if isinstance(x, ast.FunctionDef)]
        for module in files
    }
    launched = {stem for stem, found in names.items() if any(n.endswith("_kernel") for n in found)}
    twins = {stem for stem, found in names.items() if "_reference" in str(found)}
    twins |= {x.path.stem for x in files if re.search(r"launch\.takes\(|by_path\(", x.text)}
    assert launched - twins == {"largest"} and len(launched) > 10


def test_the_spine_does_not_know_these_rooms():
    """None of its files but block.py, which chooses runners, imports one of them."""
    spine = re.findall(r"\| `((?:block|recompute|shard|distributed)/\w+\.py)` \|", TEXT)
    assert len(spine) == 8
    apart = [f"bmtrain.{room}" for room in ("compile", "parallel", "compat", "verification")]
    known = {
        (str(module.path), imported.module.split(".")[1])
        for module in modules()
        if str(module.path).removeprefix("bmtrain/") in spine
        for imported in module.imports()
        if within(imported.module, *apart)
    }
    assert known == {("bmtrain/block/block.py", "compile")}


def test_model_center_uses_these_subpackages_of_bmtrain():
    """And the public names of the package."""
    said = re.search(r"uses public names of `bmtrain` and these subpackages: ([^.]+)\.", TEXT)
    assert said is not None
    used = {
        imported.module.split(".")[1]
        for module in modules()
        if not module.in_bmtrain
        for imported in module.imports()
        if imported.module.startswith("bmtrain.")
    }
    assert used == set(re.findall(r"`(\w+)`", said[1]))


def test_layers_are_sharded_in_two_places():
    """No other layer asks whether there is a run."""
    asking = [m.path.name for m in of_room("model_center/layer/") if "is_initialized" in m.text]
    assert sorted(asking) == ["parameter.py", "stack.py"]
