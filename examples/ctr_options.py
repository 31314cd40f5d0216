"""Types of the examples' options."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from `least` on."""

    def parse(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{text} must be {least} or more")
        return number

    parse.__name__ = "int"  # argparse names the type when the text is not a number
    return parse
