from __future__ import annotations

from lightning_dlrover.output import text_table


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    rows = [("job", "steps", ""), ("a", "1,000,000", "finished"), ("longest", "5", "")]
    assert text_table("<><", rows, indent=2) == [
        "  job          steps",
        "  a        1,000,000  finished",
        "  longest          5",
    ]


def test_a_table_without_rows_has_no_lines() -> None:
    assert text_table("<>", []) == []
