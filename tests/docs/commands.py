"""Commands on the pages: what a program's own parser says of them."""

import argparse
import importlib
import re
import shlex
from unittest import mock

from tests.docs.pages import ROOT
from tests.modules import importable
from torch.distributed.run import get_args_parser

from model_center.arguments import make_parser, parse_args

# Programs of others: nothing here knows their arguments.
FOREIGN = {
    *("git", "cd", "export", "mkdir", "unzip", "rm", "cp", "tar", "source", "kill", "cat", "ls"),
    *("docker", "apptainer", "singularity", "nvidia-smi", "nsys", "py-spy", "dmesg", "conda"),
    *("hf", "huggingface-cli", "modelscope", "tensorboard", "lm-eval", "tune", "deepspeed"),
    *("srun", "sbatch", "salloc", "scancel", "mpirun", "ray", "kubectl", "sky", "apt"),
}
_ASSIGNMENT = re.compile(r"[A-Z_][A-Z_0-9]*=.*")


class BadCommand(AssertionError):
    """A command of a page that its program would refuse."""


class _Parsed(Exception):
    """A program has read its arguments; that is all that is asked of it here."""


def _stop_behind_the_parser(main, words):
    """Call a program's `main`, and end it as soon as it has read its arguments."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser, *given, **more):
        parse(parser, *given, **more)
        raise _Parsed

    with mock.patch.object(argparse.ArgumentParser, "parse_args", parse_and_stop):
        try:
            main(words)
        except _Parsed:
            return
    raise BadCommand("the program reads no arguments")


def lines(text):
    """The commands of a block, each cut into words, without settings of variables before it."""
    commands = []
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"\s(?:&&|\|\||\||;)\s", line):
            words = shlex.split(part, comments=True)
            while words and _ASSIGNMENT.fullmatch(words[0]):
                words = words[1:]
            if words:
                commands.append(words)
    return commands


def check(words):
    """Raise BadCommand if the command is one of ours and would be refused.

    A command that nobody knows is refused too.
    """
    name, rest = words[0], words[1:]
    if name in FOREIGN or "/bin/" in name:  # an environment of its own
        return
    checks = {
        "pip": _pip,
        "make": _make,
        "torchrun": _torchrun,
        "bmtrain": lambda words: _module("bmtrain", words),
        "model_center": lambda words: _module("model_center", words),
        "python": _python,
        "python3": _python,
        "scripts/launch.py": _launch,
    }
    if name not in checks:
        raise BadCommand(f"{name} is neither ours nor in FOREIGN of tests/docs/commands.py")
    try:
        checks[name](rest)
    except SystemExit as end:
        raise BadCommand(f"the program would end with {end.code}") from end
    except ValueError as error:
        raise BadCommand(str(error)) from error


def _python(words):
    while words and words[0] in ("-W", "-u", "-X"):
        words = words[1:] if words[0] == "-u" else words[2:]
    if words[0] == "-m":
        _module(words[1], words[2:])
    elif words[0] != "-c":
        _program(words[0], words[1:])


def _torchrun(words):
    parser = get_args_parser()
    options = parser.parse_args(words)
    if options.module:
        _module(options.training_script, options.training_script_args)
    else:
        _program(options.training_script, options.training_script_args)


def _module(name, words):
    if name in ("bmtrain", "model_center"):
        _stop_behind_the_parser(importlib.import_module(f"{name}.__main__").main, words)
    elif name == "torch.distributed.run":
        _torchrun(words)
    elif name not in ("venv", "pip", "pytest", "http.server", "tests.programs", "scripts.interop"):
        raise BadCommand(f"python -m {name}: not a program of ours")


OWN_FLAGS = {"finetune_t5_squad.py": ["--beam-size"]}


def _program(name, words):
    path = ROOT / name
    if "/" not in name:
        return  # a file of the reader's
    if not path.is_file():
        raise BadCommand(f"there is no {name}")
    if path.parent.name == "language_models" and path.name.startswith(("finetune", "pretrain")):
        parser = make_parser()
        for flag in OWN_FLAGS.get(path.name, []):
            parser.add_argument(flag, type=float)
        parse_args(parser, words, required=["--model-config", "--base-path"])
    elif path == ROOT / "examples" / "gpt2" / "train.py":
        _gpt2(words)
    elif path == ROOT / "scripts" / "launch.py":
        _launch(words)


def _launch(words):
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc", type=int)
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(words)
    _program(options.program, options.arguments)


def _gpt2(words):
    with importable(ROOT / "examples" / "gpt2"):
        parser = importlib.import_module("options").build_parser()
    parser.parse_args(words)


def _make(words):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    goals = [word for word in words if "=" not in word]
    for goal in goals:
        if goal not in targets:
            raise BadCommand(f"the Makefile has no target {goal}")
    unknown = settings.keys() - {"ARGS", "NPROC", "PYTHON", "JOBS", "TORCH", "TRANSFORMERS"}
    if unknown:
        raise BadCommand(f"the Makefile has no variable {', '.join(unknown)}")
    if goals == ["train"]:
        arguments = shlex.split(settings.get("ARGS", ""))
        if "--help" not in arguments:
            _gpt2(arguments)


def _pip(words):
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    extras = re.findall(
        r"^(\w+) = \[", project.partition("[project.optional-dependencies]")[2], re.M
    )
    for word in words:
        found = re.fullmatch(r"(?:\.|plainshard)\[([\w,]+)\]", word)
        for extra in found[1].split(",") if found else []:
            if extra not in extras:
                raise BadCommand(f"{word}: there is no extra {extra}")
