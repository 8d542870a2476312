"""The site: it builds without a warning, its pictures are up to date, nothing public is left out."""

import collections
import importlib
import inspect
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from sphinx.cmd.build import build_main
from tests.docs.pages import ROOT, SITE, name_of, pages

import bmtrain as bmt

# Root files belong to no tree; what they link to is looked at too.
NAMES = "AGENTS CHANGELOG CONTRIBUTING README README-zh docs/figures docs/architecture docs/claims"
EXAMPLES = " examples/gpt2/README examples/language_models/README"
DOCUMENTS = [*(ROOT / f"{name}.md" for name in (NAMES + EXAMPLES).split()), *pages()]
PARTS = {
    "bmtrain": "optim loss lr_scheduler inspect nn distributed benchmark plan",
    "model_center": "model layer tokenizer dataset metrics generation training",
}
MODULES = [f"{package}.{name}" for package, names in PARTS.items() for name in names.split()]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The site, as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SITE / "build.py"), "--output", str(folder)]
    how: Any = {"env": environment, "capture_output": True, "text": True, "timeout": 900}
    done = subprocess.run(command, check=False, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.mark.long
def test_pages_are_built_and_languages_link_to_each_other(built):
    """Each page that has a counterpart; and every link between the trees leads to a page."""
    assert (built / "index.html").is_file()
    names = {name_of(page) for page in pages()}
    for name in names:
        language, _, rest = name.partition("/")
        page = built / f"{name}.html"
        text = page.read_text("utf-8")
        for other in {"en", "zh"} - {language}:
            target = f"{'../' * name.count('/')}{other}/{rest}.html"
            assert (f'href="{target}"' in text) == (f"{other}/{rest}" in names), name
        for found in re.findall(r'href="((?:\.\./)+(?:en|zh)/[^"#]*)', text):
            assert (page.parent / found).resolve().is_file(), f"{name} links to {found}"
        assert "site:" not in re.findall(r'href="([a-z]*:)', text), name


@pytest.mark.long
def test_every_public_name_is_in_the_api(built):
    texts = [page.read_text("utf-8") for page in (built / "en" / "api").glob("*.html")]
    ids = [one for text in texts for one in re.findall(r'<dt class="sig[^>]* id="([^"]+)"', text)]
    submodules = {name for name in bmt.__all__ if inspect.ismodule(getattr(bmt, name))}
    names = set(bmt.__all__) - submodules - {"verify"}
    for module in MODULES:
        names |= set(importlib.import_module(module).__all__)
    assert not names - {one.rpartition(".")[2] for one in ids}
    member = r'<dl class="py (?:method|property)">\s*<dt class="sig[^>]* id="([^"]+)\.\w+"'
    members = collections.Counter(one for text in texts for one in re.findall(member, text))
    assert not {name: count for name, count in members.items() if count > 10}


def test_chinese_api_pages_have_all_names():
    """The same directives as in English, and a line in Chinese for each name."""
    for page in (SITE / "en" / "api").glob("*.md"):
        english, chinese = (
            (SITE / language / "api" / page.name).read_text("utf-8") for language in ("en", "zh")
        )
        directive = r"^(?:\.\. \w+:: .*|   :.*)"
        shown = [re.findall(directive, text, flags=re.M) for text in (english, chinese)]
        assert shown[0] == shown[1], page.name
        names = re.findall(
            r"^\.\. auto(?:function|class|data):: \S*?(\w+)(?:\.__call__)?$", english, re.M
        )
        lines = re.findall(r"^\| `(\w+)` \| .*[\u4e00-\u9fff]", chinese, re.M)
        assert not {name.lower() for name in names} - {name.lower() for name in lines}, page.name


@pytest.mark.long
def test_pages_link_to_their_source_where_the_repository_has_an_address(tmp_path):
    """Of a site of one page; the repository's address is a setting of docs/site/conf.py, empty so far."""
    (tmp_path / "en").mkdir()
    (tmp_path / "en" / "index.md").write_text("# A page\n")
    for address, count in (("", 0), ("https://forge.example/bmtrain", 1)):
        words = ["-q", "-c", SITE, "-D", f"repository={address}", tmp_path / "en", tmp_path / "out"]
        assert build_main([*map(str, words), "-E"]) == 0
        text = (tmp_path / "out" / "index.html").read_text("utf-8")
        assert text.count(f'href="{address}/edit/main/docs/site/en/index.md"') == count
        assert ("edit/main" in text) == bool(count)


@pytest.mark.long
def test_pictures_are_those_that_the_program_draws():
    command = [sys.executable, str(SITE / "draw.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


KNOBS: list[Any] = [
    bmt.init_distributed,
    bmt.Block,
    bmt.BMTrainModelWrapper,
    bmt.optim.OptimManager,
    bmt.optim.AdamOptimizer,
    bmt.optim.AdamOffloadOptimizer,
    bmt.CheckpointManager,
]


def test_every_knob_is_explained():
    text = (SITE / "en" / "knobs.md").read_text("utf-8")
    named = set(re.findall(r"`(\w+)`", text))
    for knob in KNOBS:
        known = inspect.signature(knob).parameters.values()
        wanted = {x.name for x in known if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)}
        wanted -= {"self", "model", "inner_module"}
        assert not wanted - named, knob


def test_links_lead_somewhere():
    """To files that there are, and to headings that these have."""
    dead = []
    for page in DOCUMENTS:
        for target in links(page.read_text("utf-8")):
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists():
                dead.append(f"{page.relative_to(ROOT)}: {target}")
            elif anchor and anchor not in headings(file.read_text("utf-8")):
                dead.append(f"{page.relative_to(ROOT)}: {target}: no such heading")
    assert not dead, "\n".join(dead)


def test_files_behind_claims_exist():
    text = (ROOT / "docs" / "claims.md").read_text("utf-8")
    named = re.findall(r"`((?:tests|benchmarks|examples|\.github)/[\w./-]+)`", text)
    assert named and not [name for name in named if not (ROOT / name).exists()]


def links(text):
    """Targets of links and pictures in Markdown, but for those on the network."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    outside = re.sub(r"`[^`\n]*`", "", outside)
    found = re.findall(r"\]\(([^)\s]+)\)", outside)
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def headings(text):
    """The anchors of a page, as GitHub and MyST make them."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", outside, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_pages_begin_with_what_they_are_for():
    """English pages that guide: a paragraph that says what a reader gets, before any code or table."""
    for page in pages():
        name = name_of(page)
        if re.match(
            r"en/(guides|migrate|recipes)/|en/(install|first-run|how-it-works|knobs)", name
        ):
            text = re.sub(r"<!--.*?-->\n\n", "", page.read_text("utf-8"))
            first = text.split("\n\n")[1]
            assert re.match(r"[A-Z]", first) and 20 < len(first) < 900, name
            assert "At the end of this" not in first, name


# Words that read as translated, or that only this project used: what a native engineer writes is
# beside each. Prose of pages and of the rooms below is free of them.
COINED = {
    "goes on|go on|going on|gone on": "resumes, continues",
    "learnt": "trained on; in the loss",
    "stands|stands for": "is; means",
    "whoever": "the reader, the caller",
    "for ever": "forever; until it is killed",
    "what is there": "the existing ..., with its noun",
    "is said|are said|was said|is told|are told": "is reported, raises",
    "told apart": "distinguished",
    "in the place of": "instead of",
    "roomy|does_nothing|is_bare|once_for_all": "names that nobody can search for",
}
# What Chinese pages say for it: CONTRIBUTING.md has the glossary.
CHINESE = {
    "聚集": "收集",
    "规约": "归约",
    "核函数": "内核",
    "重算": "重计算",
    "补齐": "填充",
    "批次": "批",
    "文件夹": "目录",
    "切片": "分片",
}
ROOMS = "layer model weights generation kernels metrics tokenizer hub config"
PROSE = [
    *(page for page in pages() if name_of(page).startswith("en/")),
    *(
        ROOT / f"{name}.md"
        for name in ["AGENTS", "CONTRIBUTING", "README", "docs/architecture", "docs/claims"]
    ),
    *(path for room in ROOMS.split() for path in (ROOT / "src/model_center" / room).rglob("*.py")),
]


def test_prose_has_no_coined_words():
    """Blocks and names in backticks quote programs, and are left out."""
    found = []
    for path in PROSE:
        text = re.sub(r"^ *(`{3,}).*?^ *\1", "", path.read_text("utf-8"), flags=re.M | re.S)
        text = re.sub(r"`[^`\n]*`", "", text)
        for words, instead in COINED.items():
            for match in re.finditer(rf"\b(?:{words})\b".replace(" ", r"\s+"), text, re.I):
                found.append(f"{path.relative_to(ROOT)}: {match[0]!r}: write {instead}")
    for path in [*(SITE / "zh").rglob("*.md"), ROOT / "README-zh.md"]:
        text = path.read_text("utf-8")
        found += [
            f"{path.name}: {word}: write {instead}"
            for word, instead in CHINESE.items()
            if word in text
        ]
    assert not found, "\n".join(found)
