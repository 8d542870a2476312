"""How Sphinx builds the site: one configuration for both languages.

    sphinx-build -n -W --keep-going -c docs/site -D language=en docs/site/en build/docs/en

`make docs` does that for every language whose folder has an index.md; see build.py.
"""

from __future__ import annotations

import logging
import pathlib
import posixpath
import re
from typing import Any

import jieba
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config

from bmtrain.version import __version__

SITE = pathlib.Path(__file__).resolve().parent
LANGUAGES = {"en": "English", "zh": "简体中文"}  # a folder, and what its readers call it

# The repository's address on a forge, from which pages get a link "Edit this page". Empty: there is
# no such address yet, and no link. For one build: sphinx-build -D repository=https://...
repository = ""

project = "bmtrain"
copyright = "the maintainers of bmtrain"
version = release = __version__
jieba.setLogLevel(logging.WARNING)  # cuts Chinese into words for the search
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
templates_path = ["_templates"]
locale_dirs = [str(SITE / "_locale")]
gettext_auto_build = True
exclude_patterns = ["_*"]

myst_heading_anchors = 4
myst_url_schemes = {"http": None, "https": None, "mailto": None, "site": None}

default_role = "code"  # docstrings have names between single backticks, as Markdown has
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
# Types of torch and of Python, and classes of ours that users only pass on, have no page here.
nitpick_ignore_regex = [("py:.*", ".*")]

html_theme = "furo"
html_title = "bmtrain"
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "languages.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}

# A link, or a picture, whose target is above the page's folder.
_LINK = re.compile(r"(?P<text>(?P<picture>!?)\[[^\]\n]*\])\((?P<target>\.\./[^)\s]+)\)")
# What begins a section of a docstring, beside those that napoleon knows.
_CODE_SECTION = re.compile(r"^Examples?:$")
_SECTION = re.compile(r"^(Args|Arguments|Attributes|Returns|Raises|Yields|Note|Source|Sources):")


def folder_of(app: Sphinx) -> str:
    """The language that is built, by the name of its folder."""
    return pathlib.Path(app.srcdir).name


def as_restructured_text(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Mark what docstrings show as code: examples, and paragraphs that are indented."""
    out: list[str] = []
    in_section = False
    for number, line in enumerate(lines):
        if _CODE_SECTION.match(line):
            out += ["Example::", ""]
            in_section = True
            continue
        if _SECTION.match(line):
            in_section = True
        elif line and not line.startswith(" "):
            in_section = False
        begins_code = (
            not in_section
            and line.startswith("    ")
            and (number == 0 or not lines[number - 1].strip())
            and not _is_in_code(out)
        )
        if begins_code:
            out += ["::", ""]
        out.append(line)
    lines[:] = out


def _is_in_code(lines: list[str]) -> bool:
    """Whether the last line that is not empty is indented."""
    full = [line for line in lines if line.strip()]
    return bool(full) and full[-1].startswith("    ")


def name_links_out(app: Sphinx, docname: str, source: list[str]) -> None:
    """Say of links that leave this language where they go: Sphinx knows its own pages only.

    Another page of the site becomes "site:", any other file of the repository "path:", which is
    copied and downloaded.
    """
    folder = pathlib.Path(app.srcdir)

    def named(match: re.Match[str]) -> str:
        page, mark, anchor = match["target"].partition("#")
        target = ((folder / docname).parent / page).resolve()
        if target.is_relative_to(folder) or not target.is_file() or match["picture"]:
            return match[0]
        if target.suffix == ".md" and target.is_relative_to(SITE):
            address = target.relative_to(SITE).with_suffix(".html").as_posix()
            return f"{match['text']}(site:{address}{mark}{anchor})"
        return f"{match['text']}(path:{page})"

    source[0] = _LINK.sub(named, source[0])


def point_to_languages(app: Sphinx, doctree: nodes.document) -> None:
    """Make links to other languages relative to the page, as all others are."""
    here = posixpath.join(folder_of(app), posixpath.dirname(app.env.docname))
    for node in doctree.findall(nodes.reference):
        if node.get("refuri", "").startswith("site:"):
            address, mark, anchor = node["refuri"].removeprefix("site:").partition("#")
            node["refuri"] = posixpath.relpath(address, here) + mark + anchor


def offer_languages(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: object
) -> None:
    """Give the sidebar the same page in other languages."""
    ups = "../" * (pagename.count("/") + 1)
    context["other_languages"] = [
        (f"{ups}{folder}/{pagename}.html", title)
        for folder, title in LANGUAGES.items()
        if folder != folder_of(app) and (SITE / folder / f"{pagename}.md").is_file()
    ]


def link_to_source(app: Sphinx, config: Config) -> None:
    """Have the theme link each page to its file on the forge."""
    if config.repository:
        source = f"{config.repository}/edit/main/docs/site/{folder_of(app)}/{{filename}}"
        config.html_theme_options["source_edit_link"] = source


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls."""
    app.add_config_value("repository", "", "html")
    app.connect("config-inited", link_to_source)
    app.connect("autodoc-process-docstring", as_restructured_text, priority=100)
    app.connect("source-read", name_links_out)
    app.connect("doctree-read", point_to_languages)
    app.connect("html-page-context", offer_languages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
