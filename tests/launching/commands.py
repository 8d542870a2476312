"""Commands that start `python -m model_center train`, taken apart and checked."""

import argparse
import re
import shlex

from torch.distributed.run import get_args_parser

from model_center.commands import train

PROGRAM = ["-m", "model_center", "train"]
# Options of other launchers, with the number of words that follow.
SRUN = {"-n": 1, "-N": 1, "--gpus-per-node=8": 0, "--kill-on-bad-exit=1": 0}
MPIRUN = {"-n": 1, "-x": 1, "--host": 1}


def commands(text):
    """The words of each command of a shell script in which the program stands."""
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [shlex.split(line) for line in lines if "model_center train" in line]


def check(words):
    """AssertionError or SystemExit unless launcher and program take them; the program's arguments."""
    place = next(i for i in range(len(words)) if list(words[i : i + 3]) == PROGRAM)
    check_launcher(list(words[:place]))
    return check_program(words[place + 3 :])


def check_program(arguments):
    parser = argparse.ArgumentParser(exit_on_error=False)
    train.add_arguments(parser)
    args = parser.parse_args(arguments)
    assert args.model_config and args.data and args.save and args.resume
    return args


def check_launcher(words):
    words = words[1:] if words[0] in ("exec",) else words
    while "=" in words[0] and not words[0].startswith("-"):  # variables
        words = words[1:]
    name, *options = words
    if name == "torchrun":
        # numbers may stand in variables of the shell; the program is the last word
        numbers = [re.sub(r"^\$\w+$", "2", option) for option in options]
        get_args_parser().parse_args([*numbers, "-m", "program"])
        return
    assert options.pop() == "python" or name == "python", words
    known = {"srun": SRUN, "mpirun": MPIRUN, "python": {}}[name]
    while options:
        for _ in range(known[options.pop(0)]):
            options.pop(0)
