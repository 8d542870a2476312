"""Build the site into build/docs: `make docs`. A warning is an error.

Every language whose folder has an index.md is built: build/docs/en/index.html, and so on. The
folder itself opens at English.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from sphinx.cmd.build import build_main

SITE = pathlib.Path(__file__).resolve().parent
OUTPUT = SITE.parents[1] / "build" / "docs"
LANGUAGES = {"en": "en", "zh": "zh_CN"}  # a folder, and Sphinx's name of its language
FIRST_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=en/index.html">
<title>bmtrain</title></head>
<body>
LINKS
</body>
</html>
"""


def build(folder: str, output: pathlib.Path) -> int:
    """Build one language; Sphinx's exit status."""
    return build_main(
        [
            *("-n", "-W", "--keep-going", "-q", "-j", "auto"),
            *("-c", str(SITE), "-D", f"language={LANGUAGES[folder]}"),
            *("-d", str(output / ".doctrees" / folder)),
            *(str(SITE / folder), str(output / folder)),
        ]
    )


def main() -> int:
    """Build what is asked for; returns the exit status."""
    there = [folder for folder in LANGUAGES if (SITE / folder / "index.md").is_file()]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT, help="(%(default)s)")
    parser.add_argument("--language", nargs="+", choices=there, default=there, help="(all)")
    options = parser.parse_args()
    statuses = [build(folder, options.output) for folder in options.language]
    if any(statuses):
        return 1
    links = "\n".join(f'<p><a href="{name}/index.html">{name}</a></p>' for name in there)
    page = options.output / "index.html"
    page.write_text(FIRST_PAGE.replace("LINKS", links), encoding="utf-8")
    print(f"{page}: {', '.join(options.language)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
