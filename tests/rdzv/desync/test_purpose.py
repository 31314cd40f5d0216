"""Properties of a collective that workers compare before they begin it."""

from __future__ import annotations

import sys

from lightning_dlrover.rdzv.desync import Place, Purpose, place_of, shown

USER = Place("/home/me/train.py:3 in main", "", "train.py:3")


def test_purpose_holds_kind_and_details() -> None:
    keys = {Purpose("reduce").key, Purpose("reduce", "[2]").key, Purpose("reduce", "[3]").key, Purpose("gather", "[3]").key}
    assert len(keys) == 4
    assert all(0 <= key < 1 << 62 for key in keys)


def test_lines_of_barriers_may_differ_and_those_of_reductions_not() -> None:
    other = Place("/home/me/train.py:9 in main", "", "train.py:9")
    assert Purpose("barrier", place=USER).key == Purpose("barrier", place=other).key
    assert Purpose("reduce", place=USER, same_line=True).key != Purpose("reduce", place=other, same_line=True).key


def test_folder_of_a_script_may_differ_between_hosts() -> None:
    other = Place("/mnt/job/train.py:3 in main", "", "train.py:3")
    assert Purpose("reduce", place=USER, same_line=True).key == Purpose("reduce", place=other, same_line=True).key


def test_caller_within_lightning_is_compared() -> None:
    other = Place(USER.user, "lightning.pytorch.trainer.trainer.Trainer.save_checkpoint", USER.line)
    assert Purpose("barrier", place=USER).key != Purpose("barrier", place=other).key


def test_place_is_the_innermost_line_outside_of_libraries() -> None:
    library: dict[str, object] = {"__name__": "lightning.pytorch.core.module", "sys": sys}
    exec("def all_gather():\n    return sys._getframe()", library)
    place = place_of(library["all_gather"]())  # type: ignore[operator]
    assert place.user.endswith("in test_place_is_the_innermost_line_outside_of_libraries")
    assert place.caller == "lightning.pytorch.core.module.all_gather"
    assert place.line.startswith("test_purpose.py:")


def test_shown_place_is_not_compared() -> None:
    frame = sys._getframe()
    first = Purpose("vote", place=shown(frame))
    second = Purpose("vote", place=shown(frame))
    assert first.key == second.key
    assert first.place != second.place
