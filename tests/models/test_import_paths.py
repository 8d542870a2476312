"""Import paths, names and arguments of ModelCenter: a table of them, and what is here."""

import ast
import importlib
import inspect
import operator
from pathlib import Path

import pytest
import torch
from tests.children import ran

from model_center import compat

TABLE = Path(__file__).with_name("model_center_names.txt")
VALUES = {"torch.half": torch.half, "torch.float": torch.float}


def table():
    """The entries of each module; lines that are indented twice go on with the one before."""
    found = {}
    module = ""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("        "):
            found[module][-1] += " " + line.strip()
        elif line.startswith("    "):
            found[module].append(line.strip())
        elif line and not line.startswith("#"):
            module = line
            found[module] = []
    return found


ENTRIES = table()


def imported(module):
    """A module of the table."""
    return importlib.import_module("model_center" + f".{module}".removesuffix(".model_center"))


def value_of(node):
    """A default of the table."""
    if isinstance(node, ast.Call):  # float("-inf")
        return float(ast.literal_eval(node.args[0]))
    text = ast.unparse(node)
    return VALUES[text] if text in VALUES else ast.literal_eval(node)


def misfit(taken, wanted, is_forward):
    """Why a call that fits `wanted` does not fit `taken`, or means something else; empty if not.
    The forward of a model takes nothing else by position.
    """
    ours = [one for one in taken.parameters.values() if one.name != "self"]
    places = [one for one in ours if one.kind is one.POSITIONAL_OR_KEYWORD]
    names = [one.arg for one in wanted.args]
    if [one.name for one in places][: len(names)] != names:
        return f"takes {[one.name for one in places]}, not {names}"
    of_table = [None] * (len(names) - len(wanted.defaults)) + list(wanted.defaults)
    for one, node in zip(places, of_table, strict=False):
        if node is not None and one.default is not one.empty and ast.unparse(node) == "...":
            continue
        if node is not None and one.default != value_of(node):
            return f"{one.name} is {one.default!r} where nothing is given, not {ast.unparse(node)}"
    needed = [one.name for one in places[len(names) :] if one.default is one.empty]
    if needed:
        return f"needs {needed} as well"
    if is_forward and len(places) > len(names):
        return f"takes {[one.name for one in places[len(names) :]]} by position as well"
    kinds = {one.kind for one in ours}
    if wanted.kwarg and inspect.Parameter.VAR_KEYWORD not in kinds:
        return f"takes no other keywords, as **{wanted.kwarg.arg}"
    return ""


@pytest.mark.parametrize("module", ENTRIES)
def test_names_and_arguments(module):
    """All names of a module are there, and take what they take in ModelCenter."""
    found = imported(module)
    problems = []
    for entry in ENTRIES[module]:
        name, bracket, arguments = entry.partition("(")
        try:
            thing = operator.attrgetter(name)(found)
        except AttributeError as error:
            problems.append(str(error))
            continue
        if bracket:
            wanted = ast.parse(f"def f({arguments}: ...").body[0]
            assert isinstance(wanted, ast.FunctionDef)
            is_forward = module.startswith("model.") and name.endswith(".forward")
            problem = misfit(inspect.signature(thing), wanted.args, is_forward)
            problems += [f"{name} {problem}"] if problem else []
    assert not problems, "\n".join(problems)


def test_old_paths_give_the_things_themselves():
    """Every module of `compat` is in the table, says where its names are now, and has no others.
    The table is read whole, entries on several lines too.
    """
    entries = [entry for group in ENTRIES.values() for entry in group]
    assert len(ENTRIES) > 75 and len(entries) > 350
    assert all(entry.count("(") == entry.count(")") for entry in entries)
    assert compat.MODULES.keys() - {"dataset.cpm2.cpm2_dataset"} <= ENTRIES.keys()
    for path, homes in compat.MODULES.items():
        module = imported(path)
        names = []
        for home, wanted in homes.items():
            assert f"model_center.{home}" in module.__doc__
            for name in wanted.split():
                old, _, now = name.partition("=")
                names.append(old)
                assert vars(module)[old] is vars(imported(home))[now or old]
        assert module.__all__ == sorted(names)


FRESH = """
import sys
import model_center
assert "model_center.model" not in sys.modules and "transformers" not in sys.modules
import model_center.model.config.bert_config as module
assert model_center.model.config.bert_config is module
from model_center.model import Bert, BertConfig
from model_center.model.basemodel import BaseModel
assert module.BertConfig is BertConfig and issubclass(Bert, BaseModel)
assert not [name for name in sys.modules if name.startswith("model_center.tokenizer")]
for name in ("model_center.model.bert_config", "model_center.basemodel", "model.basemodel"):
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        assert name.startswith(error.name)
    else:
        raise SystemExit(f"{name} was found")
"""


def test_what_is_not_asked_for_is_not_loaded():
    """In a process of its own; other names are as unknown as ever."""
    done = ran("-W", "error", "-c", FRESH)
    assert done.returncode == 0, done.stderr
