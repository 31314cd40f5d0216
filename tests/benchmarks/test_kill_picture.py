"""The moving picture of a killed worker is complete wherever it does not move."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from kill_picture import HEIGHT, WIDTH, Curve, picture

PUBLISHED = Path(__file__).resolve().parents[2] / "docs" / "kill.svg"
CURVE = Curve([(0.0, 8.0), (1.0, 4.0), (2.5, 2.0)], killed_s=1.0, pause_s=1.5, repeated=0)


@pytest.mark.parametrize("svg", [picture(CURVE, CURVE), PUBLISHED.read_text()], ids=["drawn", "published"])
def test_first_frame_has_the_complete_curves(svg: str) -> None:
    clip = re.search(r"<clipPath.*</clipPath>", svg)
    assert clip is not None
    rect = ElementTree.fromstring(clip.group())[0]
    assert (rect.attrib["width"], rect.attrib["height"]) == (str(WIDTH), str(HEIGHT))  # shown by what ignores animations
    assert rect[0].attrib["values"].split(";")[0] == str(WIDTH)
