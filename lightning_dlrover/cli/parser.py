"""The command line's parser: commands and their arguments, without slow imports."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lightning_dlrover._version import __version__
from lightning_dlrover.cli import options
from lightning_dlrover.cli.errors import EXIT_USAGE
from lightning_dlrover.cli.plugins import Command, add_hook_options, add_plugin_options, command_plugins
from lightning_dlrover.plugins import PluginError


def build_parser(given: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Build the parser of all commands; parsed options hold the command's name in `command`, and its plug-in in `plugin`.

    Args:
        given: the command line to parse. Building the options of all commands takes longer than parsing it, so only those of
            its command are built, and the commands of other packages are added only where it needs them. None: all are.

    Raises:
        PluginError: the command is one of another package, and cannot be used.
    """
    text = "Live elastic training: start a job, watch it, resize it while it trains."
    parser = _CommandParser(prog="dlrover", description=text)
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("-v", "--verbose", action="store_true", help="print debug messages")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (text, add_options) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if given is None or name == command_in(given):
            add_options(command)
    if problems := _add_plugins(commands, given):
        parser.epilog = "Not available: " + "; ".join(map(str, problems)).replace("%", "%%")
    return parser


def _add_plugins(commands: Any, given: Sequence[str] | None) -> list[PluginError]:
    """Add the commands of other packages; return why some of them cannot be used.

    Raises:
        PluginError: the given command cannot be used.
    """
    command = command_in(given) if given is not None else ""
    is_alone = given is not None and command and not {"-h", "--help"} & {*given[: given.index(command)]}
    if is_alone and command in _COMMANDS:
        return []
    found = command_plugins(list(_COMMANDS))
    if is_alone and any(plugin.name == command for plugin in found):
        found = [plugin for plugin in found if plugin.name == command]
    problems = []
    for plugin in found:
        try:
            plugged = plugin.load(Command)  # type: ignore[type-abstract]
            text = plugged.summary
            listed: dict[str, Any] = {"help": text.replace("%", "%%"), "description": text} if text else {}
            parser = commands.add_parser(plugin.name, **listed)
            parser.set_defaults(plugin=plugged)
            add_plugin_options(plugin, plugged, parser)
        except PluginError as error:
            if is_alone and plugin.name == command:
                raise
            problems.append(error)
    return problems


def completions(line: str) -> list[str]:
    """Return the commands or options that the last word of a command line may become."""
    *given, word = line.split(" ")[1:]
    parser: argparse.ArgumentParser = build_parser(given)
    commands: dict[str, argparse.ArgumentParser] = {}
    for each in ["", *given]:
        parser = commands.get(each, parser)
        groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        listed = {choice.dest for group in groups for choice in group._choices_actions}  # without former names
        commands = {name: found for group in groups for name, found in group.choices.items() if name in listed}
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    names = [*commands] or [option for action in shown for option in action.option_strings]
    return [name for name in names if name.startswith(word)]


def command_in(given: Sequence[str]) -> str:
    """Return the command of a command line; empty if it has none."""
    return next((word for word in given if not word.startswith("-")), "")


class _CommandParser(argparse.ArgumentParser):
    """Parser of a command, which answers wrong usage with one line, and accepts arguments between options, too."""

    hint = ""  # ends the error about unknown arguments
    _is_mixing = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if self._is_mixing:
            return found, unknown
        if unknown and not any(word.startswith("-") for word in unknown) and not self._takes_the_rest:
            self._is_mixing = True  # `dlrover scale JOB --run-dir DIR 2`: the optional number was passed over at JOB
            try:
                found, unknown = self.parse_known_intermixed_args(args, namespace)
            finally:
                self._is_mixing = False
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self.hint}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        # argparse would print the usage first: up to 30 lines before the one that matters.
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message}\n`{self.prog} --help` shows the usage\n")

    @property
    def _takes_the_rest(self) -> bool:
        return any(action.nargs in (argparse.REMAINDER, argparse.PARSER) for action in self._get_positional_actions())


def _add_job(command: argparse.ArgumentParser, is_optional: bool = False) -> None:
    """Add the name of the job that a command is about, and the options that locate it."""
    text = "the job's --rdzv-id" + " (default: the only one that runs here)" * is_optional
    command.add_argument("job", metavar="JOB", nargs="?" if is_optional else None, help=text)
    options.add_place_options(command)


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON")


def _add_run(run: argparse.ArgumentParser) -> None:
    run.usage, run.description = (
        "%(prog)s [OPTION ...] [-m | --no-python] script [ARGUMENT ...]",
        None,
    )  # all options would take 20 lines
    text = "minimum and maximum number of workers (default: those of one node, and of two, such as 1:2)"
    run.add_argument("--workers", type=options.workers, metavar="MIN:MAX", help=text)
    text = "workers of each node, each with a GPU of its own; gpu: one for each of its --gpus (default 1). --workers and "
    text += "plans count workers, and nodes come and go as a whole"
    run.add_argument("--workers-per-node", type=options.workers_per_node, default=1, metavar="N", help=text)
    text = "the only numbers of workers that plans may request, such as 1,2,4,8, or pow2 for powers of two (default: any "
    text += "within --workers). A job that loses a worker continues with the others until it is replaced"
    run.add_argument("--sizes", type=options.sizes, default=(), metavar="LIST", help=text)
    run.add_argument(
        "--rdzv-id", type=options.given, metavar="JOB", help="name of the job (default: made from the script's name)"
    )
    text = "restarts of a worker by its own agent before the node fails (default 0; 3 if each node keeps a spare process)"
    run.add_argument("--max-restarts", type=int, metavar="N", help=text)
    text = "1: keep a process that has imported the script's modules, and fork new workers from it, which then train after a "
    text += "second or two; `dlrover status` shows its memory (default 0)"
    run.add_argument("--spares", type=int, choices=(0, 1), default=0, help=text)
    text = "read from this cloud's metadata service, on each node, when the node's machine will be taken away"
    run.add_argument("--notices", choices=("aws", "gcp", "azure"), help=text)
    for name, text in options.TIMEOUTS.items():
        run.add_argument(
            options.flag(name), type=options.lease if name == "lease_ttl" else options.duration, metavar="TIME", help=text
        )
    text = "where nodes run (default local); auto: the Slurm or Kubernetes cluster that this command runs in, else local"
    run.add_argument("--target", choices=(*options.TARGETS, "auto"), default="local", help=text)
    text = "folder for the nodes' output (default RUN_DIR/JOB/logs). Slurm: must be shared; output goes to DIR/JOB"
    run.add_argument("--log-dir", type=Path, metavar="DIR", help=text)
    run.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="environment variable of the nodes; repeatable"
    )
    options.add_metrics_option(run)
    options.add_notify_option(run)
    options.add_objective_options(run)
    add_hook_options(run)
    options.add_place_options(run)
    options.add_node_options(run)
    options.add_slurm_options(run)
    options.add_kubernetes_options(run)
    form = run.add_mutually_exclusive_group()
    form.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as for `python -m`")
    text = (
        "SCRIPT is a program, which each worker starts as it is, such as a shell script that ends with exec python; not with "
    )
    text += "--spares 1"
    form.add_argument("--no-python", action="store_true", help=text)
    run.add_argument("script", help="training script; Kubernetes: its path in the image or a mounted volume")
    arguments = run.add_argument("script_args", nargs=argparse.REMAINDER, help="arguments of the script")
    arguments.required = False  # not to be named where the script is missing


def _add_doctor(doctor: argparse.ArgumentParser) -> None:
    doctor.description = (
        "Check packages, etcd, limits, names, clock and ports of this machine. With a script, also run it up to its first "
        "batch and show which of its parts a job supports. Exit code: 0 without errors, 1 with errors, 2 for wrong usage."
    )
    _add_json(doctor)
    text = "time limit for the script's first batch (default 2m)"
    doctor.add_argument("--timeout", type=options.duration, default=120.0, metavar="TIME", help=text)
    options.add_etcd_options(doctor)
    doctor.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as for `python -m`")
    text = "training script with a Lightning Trainer, then -- and its arguments"
    doctor.add_argument("script", nargs="*", metavar="SCRIPT", help=text)
    doctor.hint = "; arguments of a script go after --, as in: dlrover doctor train.py -- --epochs 2"  # type: ignore[attr-defined]


def _add_init(init: argparse.ArgumentParser) -> None:
    init.description = (
        "Show the lines that make a script elastic as a unified diff: the import, and each Trainer's strategy and callback. "
        "Refuses a script where only its author can decide, and prints what to pass. The script is not run."
    )
    init.add_argument("script", metavar="SCRIPT", help="training script, or the module that makes its Trainer")
    init.add_argument("--write", action="store_true", help="write the lines into SCRIPT (default: only show them)")


def _add_scale(scale: argparse.ArgumentParser) -> None:
    _add_job(scale)
    scale.add_argument(
        "num_workers", type=options.num_workers, nargs="?", metavar="N", help="number of workers (default: unchanged)"
    )
    for name, texts in options.SETTINGS.items():
        scale.add_argument(f"--{options.option_of(name)}", dest=name, type=options.setting, metavar="N", help=" ".join(texts))
    scale.add_argument("--auto", action="store_true", help="let the planner, or the job's pool, decide again; given alone")
    size = "per node, within the limits given to `dlrover run`; smaller nodes are replaced one at a time"
    scale.add_argument("--cpus", dest="node_cpus", type=options.setting, metavar="N", help=f"cores {size}")
    scale.add_argument("--mem", dest="node_memory_mb", type=options.memory, metavar="SIZE", help=f"memory {size}")


def _add_status(status: argparse.ArgumentParser) -> None:
    _add_job(status, is_optional=True)
    _add_json(status)
    status.add_argument("--watch", action="store_true", help="show it every two seconds, until the job ends")


def _add_report(report: argparse.ArgumentParser) -> None:
    _add_job(report)
    report.add_argument("--output", type=Path, metavar="FILE", help="HTML file to write (default: RUN_DIR/JOB/report.html)")
    report.add_argument("--open", action="store_true", help="open the report in the browser")


def _add_explain(explain: argparse.ArgumentParser) -> None:
    _add_job(explain)
    explain.add_argument("--plan", type=int, metavar="N", help="show this plan only, with every setting that it considered")
    explain.add_argument(
        "--output", type=Path, metavar="FILE", help="picture to write, .png or .svg (default: RUN_DIR/JOB/plans.png)"
    )
    explain.add_argument(
        "--history", metavar="PLACE", help="job history to read once the job is neither in etcd nor in its run folder"
    )


def _add_drain(drain: argparse.ArgumentParser) -> None:
    _add_job(drain)
    text = "worker's id from `dlrover status`, or its node, such as node1; all workers of the node leave"
    drain.add_argument("worker", metavar="WORKER", help=text)
    when = drain.add_mutually_exclusive_group()
    when.add_argument("--replace", action="store_true", help="start a replacement first")
    when.add_argument(
        "--at",
        type=options.moment,
        metavar="TIME",
        help="the node will be taken away then: start a replacement now, and leave in time in any case. +90, +5m or +1h from "
        "now, a clock time (14:30, 14:30:05), or RFC 3339 (2026-01-31T14:30:00Z)",
    )


def _add_cancel(cancel: argparse.ArgumentParser) -> None:
    _add_job(cancel)
    cancel.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="seconds to wait until all nodes have ended (default 120)"
    )


def _add_logs(logs: argparse.ArgumentParser) -> None:
    _add_job(logs)
    logs.add_argument("-f", "--follow", action="store_true", help="follow the output until the job ends")
    logs.add_argument("--log-dir", type=Path, metavar="DIR", help="--log-dir of `dlrover run` (default RUN_DIR/JOB/logs)")


def _add_stacks(stacks: argparse.ArgumentParser) -> None:
    _add_job(stacks)
    stacks.add_argument(
        "--timeout", type=float, default=10.0, metavar="S", help="seconds to wait for the workers' answers (default 10)"
    )


def _add_data(data: argparse.ArgumentParser) -> None:
    _add_job(data)
    data.description = (
        "Show how far the streams of the job's newest fit are: files, rows and the time left of the epoch. Nothing is recorded "
        "per step; rows follow from the order of the stream, whose files are listed again and compared with those of the job."
    )
    which = data.add_mutually_exclusive_group()
    text = "list the rows that make optimizer update N, counted from 1 over the whole job, with all of its accumulated "
    text += "batches; N counts global batches where the number of batches per update varies"
    which.add_argument("--step", type=options.step, metavar="N", help=text)
    text = "show in which batch and update of each epoch this row is trained; FILE may be the end of a path, and the first "
    text += "row has number 0"
    which.add_argument("--row", type=options.row, metavar="FILE:ROW", help=text)
    data.add_argument(
        "--files", nargs="+", default=[], metavar="PATH", help="paths or patterns of the files on this host, if others"
    )
    _add_json(data)


def _add_list(listing: argparse.ArgumentParser) -> None:
    _add_json(listing)
    options.add_place_options(listing)


def _add_history(history: argparse.ArgumentParser) -> None:
    actions = history.add_subparsers(dest="action", required=True, metavar="ACTION")
    texts = {
        "list": "list jobs",
        "show": "show the measurements of a job",
        "export": "write measurements as a file for `dlrover lab evaluate`",
        "remove": "forget jobs, such as one that was measured on a faulty machine",
    }
    num_jobs = {"show": None, "export": "*", "remove": "+"}
    for name, text in texts.items():
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument(
            "--history", metavar="PLACE", help="path or SQLAlchemy URL (default: DLROVER_HISTORY, else the user's own history)"
        )
        if name == "list":
            _add_json(action)
        else:
            jobs = "the job's --rdzv-id, or its key as listed" + (" (default: all)" if name == "export" else "")
            action.add_argument("job", metavar="JOB", nargs=num_jobs[name], help=jobs)
        if name == "export":
            action.add_argument("--format", choices=("csv", "jsonl"), default="csv")
            action.add_argument("--output", type=Path, metavar="FILE", help="file to write (default: standard output)")


_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "run": ("run a script as a live elastic job, on this machine, Slurm or Kubernetes", _add_run),
    "init": ("show the lines that make a script elastic, or write them", _add_init),
    "doctor": ("check this machine, its packages, etcd and a script before a job", _add_doctor),
    "scale": ("set the number of workers and their settings by hand", _add_scale),
    "status": ("show rounds, workers, rates and the current plan", _add_status),
    "report": ("write the job's report", _add_report),
    "explain": ("explain and draw the planner's decisions: measurements, predictions, results", _add_explain),
    "drain": ("drain the workers of a node: they hand over their state and leave", _add_drain),
    "cancel": ("end a job and all of its nodes, with or without a running `dlrover run`", _add_cancel),
    "logs": ("show the output of all nodes", _add_logs),
    "stacks": ("show the stack traces of all workers", _add_stacks),
    "data": ("show what a job's streams have read, and which rows made a step", _add_data),
    "list": ("list the jobs of the run folders, or of an etcd server", _add_list),
    "history": ("show or remove jobs that later jobs start from", _add_history),
}
"""Purpose and options of each built-in command, in the order of `dlrover --help`."""
