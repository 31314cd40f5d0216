"""Commands, options and policies are accepted under their former names, with one line on stderr."""

from __future__ import annotations

import pytest

from lightning_dlrover.cli.parser import build_parser
from tests.support.run_cli import RunCli

BRAIN, WHAT_IF = ("brain", "--budget", "cores=2"), ("what-if", "job")
COLOCATE, SIMULATE = ("colocate", "jobs.yaml"), ("simulate", "trace.csv", "--speeds", "steps")


@pytest.mark.parametrize(
    ("command", "former", "today", "name", "value"),
    [
        (("run", "train.py"), ["--notice", "5"], ["--preemption-notice", "5"], "preemption_notice", 5),
        (BRAIN, ["--every", "5s"], ["--interval", "5s"], "interval", 5.0),
        (BRAIN, ["--longest-wait", "5s"], ["--max-wait", "5s"], "max_wait", 5.0),
        (BRAIN, ["--pool-only"], ["--ignore-unmanaged"], "ignore_unmanaged", True),
        (WHAT_IF, ["--cluster", "+16", "cores"], ["--add", "cores=16"], "add", {"cores": 16.0, "gpus": 0.0, "memory_mb": 0.0}),
        (WHAT_IF, ["--cluster", "-2", "gpus"], ["--add", "gpus=-2"], "add", {"cores": 0.0, "gpus": -2.0, "memory_mb": 0.0}),
        (COLOCATE, ["--longest-wait", "5s"], ["--max-wait", "5s"], "max_wait", 5.0),
        (COLOCATE, ["--at-once", "3"], ["--max-parallel", "3"], "max_parallel", 3),
        (SIMULATE, ["--every", "5s"], ["--interval", "5s"], "interval", 5.0),
        (SIMULATE, ["--shake", "3"], ["--first-seed", "3"], "first_seed", 3),
    ],
)
def test_former_option_is_todays_with_one_line_about_it(
    command: tuple[str, ...], former: list[str], today: list[str], name: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [command[0], *former, *command[1:]]
    options = build_parser(given).parse_args(given)
    assert getattr(options, name) == value
    (line,) = capsys.readouterr().err.splitlines()
    assert former[0] in line
    assert f"is now called {today[0]}" in line
    given = [command[0], *today, *command[1:]]
    assert _plain(build_parser(given).parse_args(given)) == _plain(options)
    assert capsys.readouterr().err == ""


def test_option_with_several_values_is_accepted_under_its_former_name(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["colocate", "jobs.yaml", "--learn-from", "a", "b"]
    assert list(map(str, build_parser(given).parse_args(given).profiles)) == ["a", "b"]
    assert "--learn-from is now called --profiles" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "expected"), [([*BRAIN, "--policy", "ours"], "jct"), ([*SIMULATE, "--policy", "ours", "sia"], ["jct", "sia"])]
)
def test_former_policy_is_todays(given: list[str], expected: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert build_parser(given).parse_args(given).policy == expected
    assert "policy ours is now called jct" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "former"),
    [
        ("", "brain"),
        ("", "simulate"),
        ("run", "--notice"),
        ("pool run", "--every"),
        ("pool what-if", "--cluster"),
        ("colocate", "--at-once"),
    ],
)
def test_help_has_no_former_names(command: str, former: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = [*command.split(), "--help"]
    with pytest.raises(SystemExit):
        build_parser(given).parse_args(given)
    assert former not in capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("former", "today"), [(["queue"], "pool status"), (["characterize", "--compare", "a", "b"], "lab characterize")]
)
def test_former_command_runs_as_todays_with_one_line_about_it(former: list[str], today: str, dlrover: RunCli) -> None:
    refused = dlrover(*today.split(), *former[1:])
    assert refused[0] == 2
    line = f"dlrover: `dlrover {former[0]}` is now called `dlrover {today}`; the former name will be gone in 0.2\n"
    assert dlrover(*former) == (2, refused[1], line + refused[2])


def _plain(options: object) -> dict[str, object]:
    return {name: value for name, value in vars(options).items() if name != "plugin"}
