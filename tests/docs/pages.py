"""Pages of the documentation and the blocks of code in them.

A comment in the lines before a block says what is special about it:

    <!-- not run: REASON -->            the block is shown only; REASON is for readers of the source
    <!-- given: model, optimizer -->    names that the block takes for granted: see given.py
    <!-- file: NAME -->                 the block is written into the folder, and run as well
    <!-- run -->                        a shell block that is run as it stands, not only parsed
    <!-- ranks: 2 -->                   anywhere on the page: its Python blocks run on two ranks
"""

import dataclasses
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "site"
LANGUAGES = ("en", "zh")
_FENCE = re.compile(
    r"^(?P<ticks>`{3,})(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=ticks)\s*$", re.M | re.S
)
_COMMENT = re.compile(r"<!-- (?P<key>not run|given|file|run)(?:: (?P<value>.*?))? -->")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line of its fence, and what is said of it."""

    language: str
    text: str
    line: int
    remarks: dict[str, str]


def pages():
    """Every page that somebody has written."""
    return sorted(path for name in LANGUAGES for path in (SITE / name).rglob("*.md"))


def name_of(page):
    """A page's name in messages: en/guides/speed."""
    return page.relative_to(SITE).with_suffix("").as_posix()


def blocks(page):
    """The page's blocks, in order."""
    text = page.read_text("utf-8")
    found = []
    end = 0
    for fence in _FENCE.finditer(text):
        before = text[end : fence.start()].rstrip().rpartition("\n\n")[2]
        remarks = {match["key"]: match["value"] or "" for match in _COMMENT.finditer(before)}
        line = text.count("\n", 0, fence.start()) + 1
        found.append(Block(fence["info"].strip(), fence["text"], line, remarks))
        end = fence.end()
    return found


def ranks_of(page):
    """On how many ranks the page's programs run."""
    found = re.search(r"<!-- ranks: (\d+) -->", page.read_text("utf-8"))
    return int(found[1]) if found else 1
