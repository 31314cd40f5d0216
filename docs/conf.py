"""Configuration of the documentation site. `make docs` builds it into build/docs."""

from __future__ import annotations

project = "lightning-dlrover"
extensions = ["myst_parser", "sphinxarg.ext"]
exclude_patterns = ["conf.py"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_title = "lightning-dlrover"
html_copy_source = False
html_show_copyright = False
myst_heading_anchors = 4
smartquotes = False  # options begin with two hyphens
