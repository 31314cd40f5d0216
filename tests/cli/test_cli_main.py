"""The `dlrover` command itself: help, bad usage, its imports, and the separation of its arguments from the script's."""

from __future__ import annotations

import argparse
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_dlrover.cli import options
from lightning_dlrover.cli.main import command_function, main
from lightning_dlrover.cli.parser import build_parser
from lightning_dlrover.cli.plugins import Command
from lightning_dlrover.components import elastic
from tests.support.run_cli import RunCli

HEAVY = ("torch", "lightning", "torchx", "numpy", "scipy", "grpc", "psutil", "rich")


def test_help_takes_less_than_half_a_second_of_computing() -> None:
    code = (
        "import os, sys; from lightning_dlrover.cli.main import main; sys.argv = ['dlrover', '--help']\ntry: main()\nfinally: "
    )
    code += f"print(os.times().user + os.times().system, *(m for m in {HEAVY} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "COMMAND" in done.stdout
    seconds, *imported = done.stdout.splitlines()[-1].split()
    assert float(seconds) < 0.5
    assert imported == []


def test_asking_about_a_job_imports_neither_torch_nor_torchx(at: tuple[str, ...]) -> None:
    code = "import sys; from lightning_dlrover.cli.main import main; main(sys.argv[1:])\n"
    code += "print('IMPORTED', *(m for m in ('torch', 'lightning', 'torchx') if m in sys.modules))"
    command = [sys.executable, "-c", code, "status", *at]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "IMPORTED"


def test_every_command_has_a_function() -> None:
    [commands] = [action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    plugged = {name for name, parser in commands.choices.items() if isinstance(parser.get_default("plugin"), Command)}
    assert {"pool", "lab", "colocate"} <= plugged
    assert all(callable(command_function(name)) for name in commands.choices.keys() - plugged)


@pytest.mark.parametrize(("verbose", "lines"), [(False, ["warning: 2 of 3"]), (True, ["INFO a.b: one", "WARNING a.b: 2 of 3"])])
def test_modules_are_named_in_messages_only_if_asked_for(verbose: bool, lines: list[str]) -> None:
    code = f"import logging; from lightning_dlrover.cli.main import _log_to_stderr; _log_to_stderr({verbose})\n"
    code += "log = logging.getLogger('a.b'); log.info('one'); log.warning('%d of 3', 2)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.splitlines() == lines


KUBERNETES = ("--target", "kubernetes", "--image", "trainer:1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--workers", "3:1", "script.py"], "'3:1': MIN must be at least 1 and at most MAX, such as 1:3"),
        (["run", "--workers", "0:2", "script.py"], "MIN must be at least 1"),
        (["run", "--workers", "two", "script.py"], "'two' is not MIN:MAX, such as 1:3"),
        (["run", "--workers", "-1:2", "script.py"], "--workers"),
        (["run"], "the following arguments are required: script\n"),
        (["run", "--workers", "1:99999999999999999", "script.py"], "MAX must be at most 100000"),
        (["run", "--mem", "900T", "script.py"], "'900T' is not between 1M and 64T"),
        (["run", "--join-timeout", "99999999999d", "script.py"], "'99999999999d' is more than 1,000,000,000 s"),
        (["scale", "job", "--run-dir", "d", "9" * 30], "is not a number of workers from 1 to 100000"),
        (["colocate", "--max-parallel", "0", "jobs.yaml"], "'0' is not a whole number from 1 to 999999"),
        (["pool", "run", "--budget", "cores"], "'cores' has no value: give cores=N"),
        (["pool", "run", "--budget", "cores=99999999999999999999"], "cores or GPUs above 0 and up to 1,000,000,000"),
        (["run", "nowhere.py"], "script 'nowhere.py' does not exist or is not a file"),
        (["run", "."], "script '.' does not exist or is not a file"),
        (["run", "-m", "nowhere"], "-m nowhere: there is no 'nowhere' in /"),
        (["run", "-m", "json.nowhere"], "-m json.nowhere: there is no 'json.nowhere' in /"),
        (["run", "-m", "json"], "-m json.__main__: there is no 'json.__main__' in /"),
        (["run", "-m", "a/script.py"], "-m 'a/script.py' is not the name of a module: give it as in `import`"),
        (["run", "-m", "broken"], "broken.py' is not valid Python"),
        (["run", "-m", "--no-python", "nowhere"], "argument --no-python: not allowed with argument -m/--module"),
        (["run", "--no-python", "no-such-program"], "--no-python: there is no program 'no-such-program' in /"),
        (["run", "--no-python", "./nowhere"], "--no-python: program './nowhere' does not exist or is not a file"),
        (["run", "--no-python", "script.py"], "'script.py' cannot be executed; run `chmod +x script.py`, or leave out"),
        (["run", "--no-python", "--spares", "1", "true"], "cannot run another program: leave out --spares 1, or --no-python"),
        (["run", *KUBERNETES, "--no-python", "--spares", "1", "true"], "leave out --spares 1, or --no-python"),
        (["doctor", "-m"], "-m: give the name of the module to check"),
        (["doctor", "-m", "nowhere"], "-m nowhere: there is no 'nowhere' in /"),
        (["run", "broken.py"], "script 'broken.py' is not valid Python"),
        (["run", "binary.py"], "script 'binary.py' is not valid Python"),
        (["run", "--rdzv-id", "a/b", "script.py"], "--rdzv-id 'a/b' cannot name a folder"),
        (["run", "--rdzv-id", "..", "script.py"], "--rdzv-id '..' cannot name a folder"),
        (["run", "--max-restarts", "-1", "script.py"], "--max-restarts is -1"),
        (["run", "--key-prefix", "jobs", "script.py"], "--key-prefix 'jobs' must start with '/'"),
        (["run", "--key-prefix", "/a,live=0", "script.py"], "--key-prefix '/a,live=0'"),
        (["run", "--endpoint", "nonsense", "script.py"], "etcd endpoint 'nonsense'"),
        (["run", "--run-dir", "script.py", "script.py"], "choose another --run-dir"),
        (["run", "--partition", "p", "script.py"], "--partition: only with --target slurm"),
        (["run", "--target", "moon", "script.py"], "invalid choice: 'moon'"),
        (
            ["run", "--work-dir", "/", "--preemption-notice", "0", "script.py"],
            "--work-dir, --preemption-notice: only with --target slurm or",
        ),
        (["run", "--cpus", "5000", "script.py"], "--cpus 5000, but only"),
        (["run", "--cpus", "1:5000", "script.py"], "--cpus 1:5000, but only"),
        (["run", "--gpus", "tesla:1", "script.py"], "--gpus 'tesla:1' is not a number of GPUs"),
        (["run", "--workers-per-node", "0", "script.py"], "'0' is not `gpu`, nor a number of workers from 1 to 1024"),
        (["run", "--workers-per-node", "gpu", "script.py"], "--workers-per-node gpu: --gpus N sets the number of GPUs"),
        (["run", "--workers-per-node", "4", "--workers", "1:6", "script.py"], "give multiples of 4, such as 4:4"),
        (
            ["run", "--sizes", "1,x", "script.py"],
            "--sizes: 'x' is not a number of workers above 0; give pow2, or sizes such as",
        ),
        (
            ["run", "--workers", "1:4", "--sizes", "2,8", "script.py"],
            "--sizes 2,8 with --workers 1:4: 8 is outside of the job's limits of 1 to 4 workers; leave it out, or change the",
        ),
        (
            ["run", "--workers", "5:7", "--sizes", "pow2", "script.py"],
            "no size from 5 to 7 workers is a power of two; list sizes",
        ),
        (
            ["run", "--workers", "2:6", "--workers-per-node", "2", "--sizes", "3,6", "script.py"],
            "3 workers do not fill nodes of 2; give multiples of 2",
        ),
        (["run", "--workers-per-node", "2", "--gpus", "4", "script.py"], "each worker has one GPU of its own; give --gpus 2"),
        (["run", "--workers-per-node", "2", "--pool", "p", "script.py"], "a pool counts single workers"),
        (
            ["run", "--workers-per-node", "2", "--cpus", "1:2", "script.py"],
            "give one size for the whole node, such as --cpus 2",
        ),
        (["run", "--workers-per-node", "2", "--mem", "1G:2G", "script.py"], "such as --mem 2048M"),
        (["run", "--target", "slurm", "--cpus", "0", "script.py"], "'0' is not N or N:MAX"),
        (["run", "--target", "slurm", "--cpus", "4:2", "script.py"], "'4:2' is not N or N:MAX"),
        (["run", "--target", "slurm", "--mem", "4", "script.py"], "'4' is not a size of memory, such as 512M or 16G"),
        (["run", "--target", "slurm", "--mem", "4G:2G", "script.py"], "'4G:2G': SIZE must be at most MAX"),
        (["run", "--target", "slurm", "--preemption-notice", "-1", "script.py"], "--preemption-notice is -1"),
        (["run", "--target", "slurm", "--etcd-host", "h", "--endpoint", "e:1", "script.py"], "this job uses the one at e:1"),
        (["run", "--target", "slurm", "--image", "i", "script.py"], "--image: only with --target kubernetes"),
        (["run", *KUBERNETES, "/s.py"], "pods cannot reach an etcd that is started here; name one that they reach"),
        (["run", "--target", "kubernetes", "--endpoint", "h:1", "/s.py"], "needs the --image that nodes run"),
        (["run", "--env", "LEVEL", "script.py"], "--env 'LEVEL' is not NAME=VALUE"),
        (["run", *KUBERNETES, "--node-selector", "=x", "/s.py"], "--node-selector '=x' is not LABEL=VALUE"),
        (["run", *KUBERNETES, "--mount", "data", "/s.py"], "--mount 'data' is not CLAIM:PATH[:ro]"),
        (["run", *KUBERNETES, "--gpus", "many", "/s.py"], "--gpus 'many' is not [RESOURCE:]NUMBER"),
        (["run", *KUBERNETES, "--job-label", "team", "/s.py"], "--job-label 'team' is not NAME=VALUE"),
        (["run", *KUBERNETES, "--run-as", "me", "/s.py"], "--run-as 'me' is not UID[:GID] or root"),
        (["run", "--plain-jobs", "script.py"], "--plain-jobs: only with --target kubernetes"),
        (["run", *KUBERNETES, "--pod-template", "broken.py", "/s.py"], "--pod-template broken.py: it"),
        (["run", *KUBERNETES, "--pod-template", "nowhere.yaml", "/s.py"], "nowhere.yaml"),
        (["run", "--bogus", "s.py"], "dlrover run: error: unrecognized arguments: --bogus"),
        (["scale", "job", "--run-dir", "d", "2", "3"], "dlrover scale: error: unrecognized arguments: 3"),
        (["doctor", "s.py", "--epochs", "2"], "unrecognized arguments: --epochs 2; arguments of a script go after --"),
        ([], "COMMAND"),
        (["dance"], "dance"),
        (["scale", "job", "2"], "job 'job' is not known: runs/job/job.json does not exist"),
        (["status", "job"], "job 'job' is not known"),
        (["drain", "job", "w"], "job 'job' is not known"),
        (["report", "job"], "runs/job/events.jsonl does not exist"),
        (["cancel", "job"], "job 'job' is not known"),
        (["logs", "job"], "folder 'runs/job/logs' does not exist"),
    ],
)
def test_bad_usage_ends_with_code_2_and_the_reason(dlrover: RunCli, arguments: list[str], message: str) -> None:
    Path("broken.py").write_text("def f(:\n")
    Path("binary.py").write_bytes(b"\x00\x01")
    errors = dlrover.refused(*arguments)
    assert message in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("command", ["run", "scale", "lab", "history", ""])
def test_wrong_usage_is_answered_with_two_lines(dlrover: RunCli, command: str) -> None:
    code, _, errors = dlrover(*[command][: bool(command)], "--bogus")
    assert (code, len(errors.splitlines())) == (2, 2), errors


def test_help_of_run_begins_with_its_arguments_and_not_with_a_list_of_options(dlrover: RunCli) -> None:
    lines = dlrover("run", "--help")[1].splitlines()
    assert lines[:2] == ["usage: dlrover run [OPTION ...] [-m | --no-python] script [ARGUMENT ...]", ""]
    assert lines[2] == "positional arguments:"


def test_arguments_that_others_must_not_touch_arrive_as_they_were(dlrover: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(
        "lightning_dlrover.cli.run.run_command",
        lambda options: seen.append([options.script, *options.script_args]) or 0,  # type: ignore[func-returns-value]
    )
    words = ["${app_id}", "a$$b", "$(HOME)", "100%25", 'it\'s "so"', "two\nlines", "--escaped", ""]
    [role] = elastic.train(*words, script="train.py").roles
    assert "$" not in "".join(role.args).replace("${app_id}", "", 1)  # TorchX replaces the job's name
    assert dlrover(*role.args[2:])[0] == 0
    assert seen == [["train.py", *words]]


def test_the_pages_on_schedulers_name_only_options_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    known = set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out))
    for page in ("local", "slurm", "kubernetes"):
        text = (Path(__file__).parents[2] / "docs" / "start" / f"{page}.md").read_text()
        rows = [line for line in text.splitlines() if line.startswith("| `--")]
        started = re.findall(r"dlrover run ((?:[^\n]*\\\n)*[^\n`]*)", text)
        started = [options.split(".py")[0] for options in started]  # the remaining options belong to the script
        named = {
            name for part in (*(row.split("|")[1] for row in rows), *started) for name in re.findall(r"--[a-z][a-z-]*", part)
        }
        assert len(named) > 10
        assert named <= known


def test_an_etcd_that_does_not_answer_is_named_within_seconds(dlrover: RunCli) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{unused.getsockname()[1]}"
    started = time.monotonic()
    assert endpoint in dlrover.refused("run", "--endpoint", endpoint, "script.py")
    assert time.monotonic() - started < 20


def test_a_port_that_is_not_etcd_is_named_within_seconds(dlrover: RunCli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"127.0.0.1:{other.getsockname()[1]}"
        assert endpoint in dlrover.refused("status", "--endpoint", endpoint, "job")


@pytest.mark.parametrize(
    "command", [("run", "--endpoint", "", "x.py"), ("run", "--rdzv-id", "", "x.py"), ("status", "--endpoint", "", "job")]
)
def test_empty_value_is_refused_with_its_option(dlrover: RunCli, command: tuple[str, ...]) -> None:
    assert f"argument {command[1]}: its value is empty, perhaps an unset variable" in dlrover.refused(*command)
    assert not Path("runs").exists()


@pytest.mark.parametrize("given", [["scale", "job", "3"], ["-v", "history", "list"], ["pool", "run", "--budget", "cores=2"]])
def test_parser_of_one_command_reads_it_as_that_of_all_does(given: list[str]) -> None:
    assert build_parser(given).parse_args(given) == build_parser().parse_args(given)
    assert build_parser(["-h", *given]).format_help() == build_parser().format_help()


def test_arguments_after_the_script_are_not_ours() -> None:
    options = build_parser().parse_args(["run", "--workers", "2", "train.py", "--workers", "9", "--", "--help", "-v"])
    assert options.workers == (2, 2)
    assert options.script_args == ["--workers", "9", "--", "--help", "-v"]


@pytest.mark.parametrize("text, seconds", [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), ("1d", 86400)])
def test_times_have_units(text: str, seconds: float) -> None:
    assert options.duration(text) == seconds


@pytest.mark.parametrize(("text", "ahead_s"), [("+90", 90.0), ("+1.5s", 1.5), ("+5m", 300.0), ("+1h", 3600.0)])
def test_time_may_be_given_from_now(text: str, ahead_s: float) -> None:
    assert options.moment(text) - time.time() == pytest.approx(ahead_s, abs=1.0)


@pytest.mark.parametrize(("text", "clock"), [("23:59", "23:59:00"), ("0:00:00", "00:00:00"), ("9:05", "09:05:00")])
def test_time_of_the_clock_is_the_next_one(text: str, clock: str) -> None:
    now, at = time.time(), options.moment(text)
    assert now < at <= now + 25 * 3600.0
    assert time.strftime("%H:%M:%S", time.localtime(at)) == clock


@pytest.mark.parametrize("text", ["2099-01-31T14:30:00Z", "2099-01-31T15:30:00+01:00", "2099-01-31 14:30:00+00:00"])
def test_time_of_rfc_3339_is_read(text: str) -> None:
    assert options.moment(text) == 4073553000.0


@pytest.mark.parametrize(
    "text", ["", "90", "+", "-5", "25:00", "12:60", "+1e9d", "2099-13-01T00:00:00Z", "2001-01-01T00:00:00Z"]
)
def test_text_that_is_no_time_to_come_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not a time|has passed"):
        options.moment(text)


def test_lease_is_at_least_etcds_shortest() -> None:
    assert options.lease("2s") == 2.0
    for text in ("1s", "2.5s"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not a lease of etcd: give whole seconds"):
            options.lease(text)


def test_number_of_workers_may_stand_after_options() -> None:
    arguments = ["scale", "job", "--run-dir", "d", "2"]
    options = build_parser(arguments).parse_args(arguments)
    assert (options.job, options.num_workers, str(options.run_dir)) == ("job", 2, "d")


@pytest.mark.parametrize(
    "line, found",
    [
        ("dlrover st", ["status", "stacks"]),
        ("dlrover -v pool ", ["run", "status", "what-if", "plan"]),
        ("dlrover pool run --own", ["--owner-weight"]),
        ("dlrover run --workers-", ["--workers-per-node"]),
        ("dlrover br", []),  # a former name
        ("dlrover run --nothing", []),
    ],
)
def test_shell_completes_commands_and_options(
    dlrover: RunCli, monkeypatch: pytest.MonkeyPatch, line: str, found: list[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", f"{line} a later word")
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    assert dlrover.output("--complete", "dlrover", "", "").split() == found
