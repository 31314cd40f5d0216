"""Configuration of the documentation site. `make docs` builds it into build/docs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

project = "lightning-dlrover"
extensions = ["myst_parser", "sphinxarg.ext"]
exclude_patterns = ["conf.py"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_title = "lightning-dlrover"
html_copy_source = False
html_extra_path = ["llms.txt"]
html_show_copyright = False
myst_heading_anchors = 4
smartquotes = False  # options begin with two hyphens


def _copy_pages(app: Any, error: Exception | None) -> None:
    """Put each page next to its HTML as it is written: llms.txt leads to these."""
    if error is None and app.builder.name == "html":
        for name in app.env.found_docs:
            shutil.copyfile(Path(app.srcdir, f"{name}.md"), Path(app.outdir, f"{name}.md"))


def setup(app: Any) -> None:
    app.connect("build-finished", _copy_pages)
