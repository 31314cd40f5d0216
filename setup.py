"""The README as an index of packages shows it. Everything else about the package is in pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

__all__ = ["index_page"]

RELATIVE = r"\((?!https?://|mailto:)[^()\s]*\)"
"""Target of a link into the repository, or to a heading of the page itself."""


def index_page(readme: str) -> str:
    """Return the README without pictures and links that lead into the repository, where an index finds nothing.

    Texts of links stay. Those that name a page, as most do, name it in the source distribution.
    """
    without_pictures = re.sub(rf"^!\[[^\]]*\]{RELATIVE}\n+", "", readme, flags=re.MULTILINE)
    return re.sub(rf"\[([^\]]*)\]{RELATIVE}", r"\1", without_pictures)


if __name__ == "__main__":  # as a build backend runs it
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(long_description=index_page(readme), long_description_content_type="text/markdown")
