"""Words that make the documentation read as translated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]

PER_1000 = 0.1

TICS = {
    "beside": r"beside",
    "meanwhile": r"meanwhile",
    "alike": r"alike",
    "anew": r"anew",
    "on record": r"on record",
    "for people": r"for people",
    "by itself": r"by (?:itself|themselves)",
    "goes on": r"go(?:es|ing)? on|went on",
    "in vain": r"in vain",
    "is no": r"(?<!there )(?:is|are) no(?! longer)",
    "as far as": r"as far as",
    "at the least": r"at the (?:least|most)",
    "for want of": r"for want of",
}


def prose() -> str:
    text = "\n".join(page.read_text() for page in PAGES)
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("tic", TICS)
def test_tic_is_rare(tic: str) -> None:
    text = prose()
    found = [text[max(0, each.start() - 40) : each.end() + 20] for each in re.finditer(rf"\b(?:{TICS[tic]})\b", text, re.I)]
    assert 1000 * len(found) / len(text.split()) <= PER_1000, found
