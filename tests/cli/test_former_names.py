"""Commands, options and policies are accepted under their former names, with one line on stderr."""

from __future__ import annotations

import pytest

from lightning_dlrover.cli.parser import build_parser

RUN = ("run", "--target", "slurm")


@pytest.mark.parametrize(
    ("given", "today", "name", "value"),
    [((*RUN, "--notice", "5", "train.py"), "--preemption-notice", "preemption_notice", 5)],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_former_option_has_the_value_of_todays_and_one_line_that_names_it(
    given: tuple[str, ...], today: str, name: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    former = next(word for word in given[1:] if word.startswith("--") and word not in ("--target",))
    options = build_parser(given).parse_args(given)
    assert getattr(options, name) == value
    assert capsys.readouterr().err == f"dlrover: {former} is now called {today}; the former name will be gone in 0.2\n"
    now = [today if word == former else word for word in given]
    assert vars(build_parser(now).parse_args(now)) == vars(options)
    assert capsys.readouterr().err == ""


def test_help_shows_todays_names_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser(["run", "--help"]).parse_args(["run", "--help"])
    shown = capsys.readouterr().out
    assert "--preemption-notice" in shown
    assert "--notice" not in shown
