"""Every block of code on the site is run, or its commands are read by the programs' own parsers.

Python blocks of a page run as they stand, in order, in one process, or on as many ranks as the page
says. Before a block that calls `init_distributed`, the run of the blocks before it ends. Names of
models on the hub are those of tiny models (see hub.py).
"""

import itertools
import os
import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest
from tests.docs import commands, given, hub
from tests.docs.pages import ROOT, blocks, name_of, pages, ranks_of
from tests.ranks.runner import run_ranks

from bmtrain.runtime import world

PAGES = {name_of(page): page for page in pages()}
SHELLS = ("shell", "bash", "sh", "console")
SHOWN = ("", "text", "json", "jsonl", "yaml", "toml", "ini", "diff", "dockerfile", "mermaid")
DIRECTIVES = ("{",)
# Whole programs and the like that other tests run: this one would do it a second time.
ELSEWHERE = {
    "en/reference/model_center": "tests/training/test_lm_guide.py",
    "en/reference/parallel": "tests/training/test_example_parallel.py",
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of the hub."""
    folder = tmp_path_factory.mktemp("hub") / "cache"
    folder.mkdir()
    hub.fill(folder)
    return folder


QUICK = "en/migrate/fsdp"  # one page in `make test`


@pytest.mark.parametrize(
    "name",
    [
        name if name == QUICK else pytest.param(name, marks=pytest.mark.long)
        for name in PAGES
        if name not in ELSEWHERE
    ],
)
def test_the_programs_of_a_page(name, cache, tmp_path):
    page, places = PAGES[name], (str(tmp_path), str(cache))
    executed = (block for block in blocks(page) if is_executed(block))
    for is_command, part in itertools.groupby(executed, key=is_run):
        if is_command:
            for words in (words for block in part for words in commands.lines(block.text)):
                run_ranks(run_command, 1, words, *places, join=False, timeout=200)
        else:
            jobs = str(page), list(part), *places
            run_ranks(run_blocks, ranks_of(page), *jobs, join=False, timeout=200)


def is_run(block):
    """Whether it is a shell block that is run."""
    return block.language in SHELLS and "run" in block.remarks


def is_executed(block):
    """Whether it is run at all, and not only read."""
    return "not run" not in block.remarks and (block.language == "python" or is_run(block))


def enter(folder, cache):
    """On a rank: the page's folder, without GPUs and network."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.chdir(folder)
    sys.path.insert(0, folder)  # files of the page import each other
    hub.use(cache)
    # what peft says where it has no network, and calls; heads that the small models lack
    warnings.filterwarnings("ignore", message="Could not find a config file")
    warnings.filterwarnings("ignore", message=".*is deprecated and will be removed in v6")
    warnings.filterwarnings("ignore", message=".*newly initialised")
    warnings.filterwarnings("ignore", message=".*lm_head.* of it is not used")


def run_blocks(page, parts, folder, cache):
    """On a rank: Python blocks, in order."""
    enter(folder, cache)
    names = {"__name__": "__main__"}
    for block in parts:
        # the lines of a traceback are those of the page
        code = compile("\n" * block.line + block.text, page, "exec")
        if "file" in block.remarks:
            file = Path(block.remarks["file"])
            file.write_text(block.text, "utf-8")
            exec(code, {"__name__": file.stem})  # as if it were imported
            continue
        if "given" in block.remarks:
            exec(compile(given.TEXT, "given", "exec"), names)
        if "init_distributed(" in block.text:
            world.shutdown()
        exec(code, names)


def run_command(words, folder, cache):
    """In a process of its own: `python FILE ...`, of the page or of the clone, or `python -m MODULE ...`."""
    enter(folder, cache)
    for name in [name for name in os.environ if "RANK" in name or "TORCHELASTIC" in name]:
        del os.environ[name]
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), folder])
    assert words[0] == "python", f"{words}: only commands of python are run"
    try:
        if words[1] == "-m":
            sys.argv = words[2:]
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words[1:]
            in_clone = ROOT / words[1]
            program = in_clone if in_clone.is_file() else words[1]
            runpy.run_path(str(program), run_name="__main__")
    except SystemExit as end:
        assert not end.code, f"{' '.join(words)} ended with {end.code}"


def test_the_commands_of_all_pages():
    """Each names a program that there is, and flags that it has."""
    bad = []
    for name, page in PAGES.items():
        for block in blocks(page):
            if block.language not in SHELLS or "not run" in block.remarks:
                continue
            for words in commands.lines(block.text):
                try:
                    commands.check(words)
                except commands.BadCommand as error:
                    bad.append(f"{name} line {block.line}: {' '.join(words)}: {error}")
    assert not bad, "\n".join(bad)


def test_shell_blocks_have_no_comments():
    """An interactive zsh takes `#` for an argument, and an apostrophe behind it for a quote that is open."""
    documents = [*PAGES.values(), *ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md")]
    bad = [
        f"{page.relative_to(ROOT)} line {block.line}"
        for page in documents
        for block in blocks(page)
        if block.language in SHELLS and re.search(r"(^|\s)#", block.text, re.M)
    ]
    assert not bad, bad


def test_blocks_that_do_not_run():
    """They are few, each with its reason; the list is here to be read. Every block has a language,
    so that none escapes for want of one; output and trees have "text" or nothing.
    """
    found = [(name, block) for name, page in PAGES.items() for block in blocks(page)]
    known = ("python", *SHELLS, *SHOWN)
    assert not [
        f"{name} line {block.line}: {block.language!r}"
        for name, block in found
        if block.language not in known and not block.language.startswith(DIRECTIVES)
    ]
    shown = [
        (name, block.remarks["not run"]) for name, block in found if "not run" in block.remarks
    ]
    assert all(len(reason.split()) > 2 for _, reason in shown), shown
    assert [name for name, _ in shown if name.startswith("en/")] == NOT_RUN
    assert len(shown) <= 3 * len(NOT_RUN)


def test_programs_print_once():
    """Not once a rank: a program of a run prints by `bmt.print_rank`. READMEs are short: what is
    longer belongs into docs/.
    """
    places = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ]
    print_alone = re.compile(r"(?<![\w.])print\(")
    assert print_alone.search("    print(1)")
    assert not print_alone.search("bmt.print_rank(1); my_print(2); log.print(3)")
    for place in places:
        text = place.read_text("utf-8")
        assert "README" not in place.name or place.parent != ROOT or text.count("\n") <= 200
        for program in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
            is_run = "init_distributed(" in program
            assert not (is_run and print_alone.search(program)), f"{place}: {program}"


NOT_RUN = [
    "en/guides/profiling",  # a GPU's memory snapshot
    "en/migrate/deepspeed",  # DeepSpeed's own program
    "en/migrate/torchtune",  # torchtune's own command
    "en/reference/interoperability",  # OpenDelta and OpenPrompt
]


def test_a_wrong_command_is_found():
    """The check can fail."""
    for text in (
        "torchrun --standalone -m model_center train --model-config x --no-such-flag",
        "python -m bmtrain no-such-command",
        "make no-such-target",
        "pip install '.[no_such_extra]'",
        "python examples/no_such_program.py",
        "no-such-program --flag",
    ):
        with pytest.raises(commands.BadCommand):
            commands.check(commands.lines(text)[0])
