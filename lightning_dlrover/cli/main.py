"""The `dlrover` command: parses, calls, prints. Anything slow to import is imported where it is used."""

from __future__ import annotations

import argparse
import ast
import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import unquote

from lightning_dlrover._version import __version__
from lightning_dlrover.components.escaped import ESCAPED
from lightning_dlrover.output import complain, flush, printable, say, show

if TYPE_CHECKING:
    from lightning_dlrover.components.targets.kubernetes_pod import KubernetesOptions
    from lightning_dlrover.components.targets.target import (
        NodeSize,
        NodeSpec,
        Target,
    )
    from lightning_dlrover.learn.history import (
        JobEntry,
        JobHistory,
    )
    from lightning_dlrover.rdzv.etcd.client import EtcdClient
    from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
    from lightning_dlrover.rdzv.job.records import (
        EventRecord,
        Keys,
        NodesRecord,
    )
    from lightning_dlrover.rdzv.live.rounds import View
    from lightning_dlrover.report.status import (
        EventLog,
        JobPlace,
    )

__all__ = ["main"]

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2

_OUTPUT_S = 60.0
"""How long output that is followed may not be readable."""

LOCAL_WORKERS_PER_CORE = 4
LEAST_LOCAL_WORKERS = 16
"""Workers that may run on one machine however few cores it has."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_SETTINGS = {
    "loader_workers": ("loader workers", "of each worker; 0: it prepares its batches itself"),
    "intra_op_threads": ("threads", "that each worker computes with; 0: as many as it has cores"),
    "prefetch_factor": ("batches ahead", "that each loader worker prepares"),
}
"""Fields of a plan that every worker carries out by itself, and what they count."""

_COUNTED = {name: texts[0] for name, texts in _SETTINGS.items()} | {"node_cpus": "cores", "node_memory_mb": "MiB of memory"}
"""What the fields of a plan count of each worker and its node."""


class UsageError(Exception):
    """Something the user asked for cannot be done; the message says what to do instead."""


class _Interrupted(BaseException):
    def __init__(self, signal_number: int) -> None:
        self.signal_number = signal_number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the process's exit code."""
    with _quiet_start() as started:
        result = _main(list(sys.argv[1:] if arguments is None else arguments), started)
    problem = flush()
    if problem is not None and problem.errno != errno.EPIPE and result == EXIT_OK:
        complain(f"standard output cannot be written: {problem.strerror}")
        return EXIT_FAILED
    return result


def _main(given: list[str], started: Callable[[], None]) -> int:
    if given[:2] == ["run", ESCAPED]:
        given[1:] = map(unquote, given[2:])
    options = _parser().parse_args(given)
    logging.basicConfig(
        level=logging.INFO if options.verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    from lightning_dlrover.components.control.controller import ControllerBusyError
    from lightning_dlrover.components.targets.target import TargetError
    from lightning_dlrover.learn.history import HistoryError
    from lightning_dlrover.rdzv.etcd.errors import EtcdError
    from lightning_dlrover.rdzv.etcd.server import EtcdServerError
    from lightning_dlrover.rdzv.job.records import RecordError
    from lightning_dlrover.report.status import JobNotFoundError

    refusals = (
        UsageError,
        HistoryError,
        JobNotFoundError,
        ControllerBusyError,
        EtcdError,
        EtcdServerError,
        RecordError,
        TargetError,
    )
    if options.run is not _run:  # which has a longer start, and handlers of its own after it
        started()
    try:
        result: int = options.run(options)
        return result
    except BrokenPipeError:
        return EXIT_OK
    except (*refusals, ValueError, OSError) as error:
        complain(str(error))
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


@contextlib.contextmanager
def _quiet_start() -> Iterator[Callable[[], None]]:
    """Let Ctrl-C end this process without a traceback, as long as nothing was started that would have to be ended first.

    The function that it gives ends that time.
    """

    def interrupted(number: int, frame: FrameType | None) -> None:
        # At once: an exception in the middle of an import would be an import's error to some modules.
        with contextlib.suppress(OSError):
            os.write(2, b"dlrover: interrupted\n")
        os._exit(128 + number)

    def started() -> None:
        if is_ours and signal.getsignal(signal.SIGINT) is interrupted:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    is_ours = threading.current_thread() is threading.main_thread()
    is_ours = is_ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, interrupted)
    try:
        yield started
    finally:
        started()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dlrover", description="Live elastic training: start a job, watch it, resize it while it trains."
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("-v", "--verbose", action="store_true", help="say more about what is done")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def job_command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("job", metavar="JOB", help="the job's --rdzv-id")
        command.set_defaults(run=run)
        _place_options(command)
        return command

    run = commands.add_parser("run", help="run a script as a live elastic job, on this machine, Slurm or Kubernetes")
    run.add_argument("--workers", default="1:2", type=_workers, metavar="MIN:MAX", help="least and most workers (default 1:2)")
    run.add_argument("--rdzv-id", type=_given, metavar="JOB", help="name of the job; default: made from the script's name")
    run.add_argument(
        "--max-restarts", type=int, default=0, metavar="N", help="restarts of a worker by its own agent (default 0)"
    )
    for name, text in _TIMEOUTS.items():
        run.add_argument(_flag(name), type=_duration, metavar="TIME", help=text)
    run.add_argument(
        "--target",
        choices=(*_TARGETS, "auto"),
        default="local",
        help="where nodes run (default local); auto: on the Slurm or Kubernetes that this command runs in, else local",
    )
    run.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="of the nodes' output (default RUN_DIR/JOB/logs); Slurm: a shared folder, in it DIR/JOB",
    )
    run.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable of the nodes; repeatable")
    _objective_options(run)
    _place_options(run)
    _node_options(run)
    _slurm_options(run)
    _kubernetes_options(run)
    run.add_argument("script", help="the training script; Kubernetes: as the image or a mount has it")
    run.add_argument("script_args", nargs=argparse.REMAINDER, help="its arguments")
    run.set_defaults(run=_run)

    scale = job_command("scale", _scale, "set the number of workers, and how each of them works, by hand")
    scale.add_argument("num_workers", type=int, nargs="?", metavar="N", help="workers; default: as many as planned now")
    for name, texts in _SETTINGS.items():
        scale.add_argument(f"--{_option(name)}", dest=name, type=_setting, metavar="N", help=" ".join(texts))
    size = "of each node, within the limits of `dlrover run`; smaller ones are replaced, one at a time"
    scale.add_argument("--cpus", dest="node_cpus", type=_setting, metavar="N", help=f"cores {size}")
    scale.add_argument("--mem", dest="node_memory_mb", type=_memory, metavar="SIZE", help=f"memory {size}")
    status = job_command("status", _status, "show rounds, workers, rates and the current plan")
    status.add_argument("--json", action="store_true", help="for programs")
    report = job_command("report", _report, "write the job's report")
    report.add_argument("--output", type=Path, metavar="FILE", help="default: RUN_DIR/JOB/report.html")
    explain = job_command("explain", _explain, "say what the planner saw, chose and got, and draw it")
    explain.add_argument("--plan", type=int, metavar="N", help="only this plan, with everything it considered")
    explain.add_argument("--output", type=Path, metavar="FILE", help="picture, .png or .svg; default: RUN_DIR/JOB/plans.png")
    explain.add_argument("--history", metavar="PLACE", help="where to look if the job has gone from etcd and folder")
    drain = job_command("drain", _drain, "ask one worker to hand over and leave")
    drain.add_argument("worker", metavar="WORKER", help="its id, as shown by `dlrover status`")
    drain.add_argument("--replace", action="store_true", help="start another worker first, which takes its place")
    cancel = job_command(
        "cancel", _cancel, "end a job and all of its nodes, also when no `dlrover run` looks after it any more"
    )
    cancel.add_argument("--timeout", type=float, default=120.0, metavar="S", help="for their end (default 120)")
    logs = job_command("logs", _logs, "show what all nodes have printed")
    logs.add_argument("-f", "--follow", action="store_true", help="what they print from now on, until the job ends")
    logs.add_argument("--log-dir", type=Path, metavar="DIR", help="as of `dlrover run` (default RUN_DIR/JOB/logs)")
    stacks = job_command("stacks", _stacks, "ask all workers where they stand, and show their stack traces")
    stacks.add_argument("--timeout", type=float, default=10.0, metavar="S", help="for their answers (default 10)")
    divide = commands.add_parser("divide", help="share cores (or GPUs) among running jobs, by what each gains from more")
    divide.description = (
        "Share a budget of cores, or of GPUs for jobs that train on them, among running jobs: whoever gains most by one more "
        "is given it first. What each gains is what its own planner has predicted last."
    )
    divide.add_argument("jobs", nargs="+", type=_weighted, metavar="JOB[=WEIGHT]", help="weight of its gains; default 1")
    divide.add_argument("--budget", required=True, type=_budget, metavar="N", help="cores, or GPUs, of all of them together")
    divide.add_argument("--apply", action="store_true", help="make it the jobs' plans; else it is only shown")
    _place_options(divide)
    divide.set_defaults(run=_divide)
    listing = commands.add_parser("list", help="list the jobs of this folder, or of an etcd")
    _place_options(listing)
    listing.set_defaults(run=_list)
    _history_commands(commands)
    return parser


def _history_commands(commands: Any) -> None:
    history = commands.add_parser("history", help="what is remembered of jobs, which later ones start from")
    actions = history.add_subparsers(required=True, metavar="ACTION")
    texts = {
        "list": "list jobs",
        "show": "show what a job has measured",
        "export": "write what was measured, for perf evaluate",
    }
    for name, text in texts.items():
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument(
            "--history", metavar="PLACE", help="path or SQLAlchemy URL; default: DLROVER_HISTORY, else your own"
        )
        action.set_defaults(run={"list": _history_list, "show": _history_show, "export": _history_export}[name])
        if name != "list":
            jobs = "the job's --rdzv-id, or its key as listed" + ("; default: all" if name == "export" else "")
            action.add_argument("job", metavar="JOB", nargs="*" if name == "export" else None, help=jobs)
        if name == "export":
            action.add_argument("--format", choices=("csv", "jsonl"), default="csv")
            action.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")


def _objective_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to aim at", "for a script whose DLRoverCallback does not say itself")
    group.add_argument("--objective", choices=("fastest", "cheapest", "efficient"), help="default fastest")
    group.add_argument("--deadline", type=_duration, metavar="TIME", help="since the job's start, such as 90m or 2h")
    group.add_argument("--budget", type=float, metavar="MONEY", help="for the whole job; needs --prices")
    group.add_argument("--prices", metavar="LIST", help="per hour, such as core_hour=0.04,gpu_hour=2.5,gib_hour=0.005")
    group.add_argument("--history", metavar="PLACE", help="path or SQLAlchemy URL of the job history, or off")


_TARGETS = ("local", "slurm", "kubernetes")

_TIMEOUTS = {
    "join_timeout": "how long a node waits for room in the job once no controller is there, such as 1h (default 10m)",
    "wait_timeout": "how long workers wait for the fewest of --workers once no controller is there (default 10m)",
    "lease_ttl": "how long a node or worker may be silent before it is taken for lost (default 5s)",
}
"""Of nodes and workers; keys of --rdzv-conf."""

_NODE_OPTIONS = {
    "gpus": ("[TYPE:]N", "GPUs; Kubernetes: TYPE is the resource's name (default nvidia.com/gpu); on this machine: N alone"),
    "work_dir": ("DIR", "where the script runs (default: Slurm: the current folder, Kubernetes: the image's); not here"),
}
"""What any scheduler can be asked for, of each node."""

_SLURM_OPTIONS = {
    "partition": ("NAME", "where nodes are queued"),
    "account": ("NAME", "whom they are charged to"),
    "qos": ("NAME", "quality of service"),
    "time": ("LIMIT", "of each node, such as 90 (minutes), 12:00:00 or 2-00"),
    "constraint": ("LIST", "features that a host must have"),
    "nodelist": ("HOSTS", "where nodes may run"),
    "exclude": ("HOSTS", "where they may not"),
    "gres": ("LIST", "generic resources of each node"),
    "setup": ("LINE", "shell that runs before the script, such as 'module load cuda'"),
}
"""Fields of `SlurmOptions` that are handed on as they are."""

_KUBERNETES_OPTIONS = {
    "image": ("IMAGE", "that nodes run; needs this package, and the script unless that is mounted"),
    "namespace": ("NAME", "where they run (default: as kubectl has it)"),
    "service_account": ("NAME", "that they run as"),
    "secret": ("NAME", "a Secret with the files that etcd wants: password, ca.crt, tls.crt, tls.key"),
    "image_pull_secret": ("NAME", "a Secret with the image's password"),
    "pod_endpoint": ("HOST:PORT", "etcd as pods reach it (default: --endpoint)"),
    "pod_template": ("FILE", "YAML: a pod template with what there is no option for, such as tolerations"),
    "python": ("PROGRAM", "of the image (default python)"),
    "queue": ("NAME", "of Volcano, that nodes wait in (default: default)"),
}

_REPEATED_OPTIONS = {
    "node_selector": ("LABEL=VALUE", "that a host must have"),
    "mount": ("CLAIM:PATH[:ro]", "a persistent volume claim, and where nodes see it"),
}
"""For Kubernetes, too."""


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _add_texts(group: Any, options: Mapping[str, tuple[str, str]]) -> None:
    for name, (value, text) in options.items():
        group.add_argument(_flag(name), default="", metavar=value, help=text)


def _node_options(parser: argparse.ArgumentParser) -> None:
    title = "what each node gets"
    text = "default: as the cluster has it; on this machine: what there is, together with the others (docs/local.md)"
    group = parser.add_argument_group(title, text)
    _add_texts(group, _NODE_OPTIONS)
    within = "with MAX a plan may ask for as many, and smaller nodes are replaced one at a time"
    group.add_argument(
        "--cpus", type=_cpus, metavar="N[:MAX]", help=f"cores (default 1; on this machine: all, shared); {within}"
    )
    group.add_argument("--mem", type=_memory_range, metavar="SIZE[:MAX]", help="memory, such as 16G or 16G:64G; likewise")
    group.add_argument("--etcd-host", metavar="HOST", help="address of this host that nodes reach the embedded etcd at")
    group.add_argument(
        "--notice",
        type=int,
        metavar="S",
        help="to hand over in, before a node's end (default 120); not on this machine. Slurm: before its time limit, for "
        "another one to take its place, too (0: it is not). Kubernetes: between SIGTERM and SIGKILL",
    )


def _slurm_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("and Slurm for", "with --target slurm")
    _add_texts(group, _SLURM_OPTIONS)
    group.add_argument(
        "--sbatch-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="for sbatch, such as --sbatch-arg=--exclusive; repeatable",
    )


def _kubernetes_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("and Kubernetes for", "with --target kubernetes; see docs/kubernetes.md")
    _add_texts(group, _KUBERNETES_OPTIONS)
    for name, (value, text) in _REPEATED_OPTIONS.items():
        group.add_argument(_flag(name), action="append", default=[], metavar=value, help=f"{text}; repeatable")
    text = "plain Jobs, though the cluster has Volcano (default: Volcano's where it has)"
    group.add_argument("--plain-jobs", action="store_const", const=True, help=text)


def _cpus(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,4})(?::(\d{1,4}))?", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not N or N:MAX, from 1 on, such as 4 or 2:8")
    return int(match[1]), int(match[2] or match[1])


def _memory(text: str) -> int:
    """MiB of `16G`, `512Mi`, `1.5T`: units of 1024, as Slurm counts them."""
    from lightning_dlrover.rdzv.job.records import MAX_MEMORY_MB

    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT])(?:i?B?)", text, re.I)
    size = float(match[1]) * {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}[match[2].upper()] if match else 0
    if not 1 <= size <= MAX_MEMORY_MB:
        raise argparse.ArgumentTypeError(f"{text!r} is no size of memory, such as 512M or 16G")
    return math.ceil(size)


def _memory_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    sizes = _memory(low), _memory(high or low)
    if sizes[0] > sizes[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: SIZE must be at most MAX")
    return sizes


def _node_sizes(options: argparse.Namespace) -> tuple[NodeSize, NodeSize]:
    """The least and the largest size of a node."""
    from lightning_dlrover.components.targets.target import NodeSize

    default = (0, 0) if options.target == "local" else (1, 1)
    low, high = zip(options.cpus or default, options.mem or (0, 0), strict=True)
    return NodeSize(*low), NodeSize(*high)


def _duration(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no time, such as 3600, 90m, 2h or 1.5d")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def _objective(options: argparse.Namespace) -> dict[str, str]:
    """Variables that tell the nodes' callbacks what the user wants, checked.

    Raises:
        ValueError: the options contradict each other.
    """
    from lightning_dlrover.learn.history import (
        HISTORY_VARIABLE,
        history_url,
    )
    from lightning_dlrover.planner.objective import VARIABLES, objective_from

    given = {"aim": options.objective, "deadline_s": options.deadline, "budget": options.budget, "prices": options.prices}
    variables = {VARIABLES[name]: str(value) for name, value in given.items() if value is not None}
    objective_from({**os.environ, **variables})
    if options.history is not None:
        variables[HISTORY_VARIABLE] = history_url(options.history) or "off"  # nodes may run in another folder
    return variables


def _place_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--endpoint", type=_given, metavar="HOST:PORT", help="etcd v3; default: DLROVER_ENDPOINT, else an embedded one"
    )
    access = parser.add_argument_group("an etcd that asks who one is", "default: as of the job, else DLROVER_USER and so on")
    access.add_argument("--user", metavar="NAME")
    access.add_argument("--password-file", metavar="FILE", help="its first line is the password")
    access.add_argument("--ca-cert", metavar="FILE", help="PEM: whom to trust for etcd's certificate; makes the connection TLS")
    access.add_argument("--cert", metavar="FILE", help="PEM: the certificate to show")
    access.add_argument("--cert-key", metavar="FILE", help="PEM: its key")
    parser.add_argument("--key-prefix", metavar="PREFIX", help="folder of all jobs' keys in etcd (default /dlrover)")
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs"), metavar="DIR", help="folder of run folders (default runs)"
    )


def _given(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("its value is empty, as of a variable that is not set; give a value, or leave it out")
    return text


def _option(setting: str) -> str:
    options = {"intra_op_threads": "threads", "prefetch_factor": "prefetch", "node_cpus": "cpus", "node_memory_mb": "mem"}
    return options.get(setting, setting.replace("_", "-"))


def _setting(text: str) -> int:
    from lightning_dlrover.rdzv.job.records import MAX_SETTING

    if not text.isdecimal() or int(text) > MAX_SETTING:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to {MAX_SETTING}")
    return int(text)


def _budget(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (budget := float(text)) < float("inf"):
            return budget
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of cores or GPUs above 0")


def _weighted(text: str) -> tuple[str, float]:
    name, given, weight = text.rpartition("=")
    if not given:
        return text, 1.0
    try:
        return name, float(weight)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: {weight!r} is no weight, such as 2 or 0.5") from None


def _workers(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not MIN:MAX, such as 1:3")
    low, high = int(match[1]), int(match[2] or match[1])
    if not 1 <= low <= high:
        raise argparse.ArgumentTypeError(
            f"{text!r}: MIN must be at least 1 and at most MAX, such as {min(low, high) or 1}:{max(low, high, 1)}"
        )
    return low, high


# --- run ---------------------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    from lightning_dlrover.report.status import (
        JobPlace,
        access_from,
    )

    if options.target == "auto":
        options.target = _surrounding_target(options)
    # The script of pods is in their image, or in a volume of theirs.
    script = Path(options.script) if options.target == "kubernetes" else _checked_script(options.script)
    run_id = options.rdzv_id or _new_run_id(script)
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", run_id):
        raise UsageError(f"--rdzv-id {run_id!r} cannot name a folder: use letters, digits, '.', '_' and '-'")
    if options.max_restarts < 0:
        raise UsageError(f"--max-restarts is {options.max_restarts}, it must be 0 or more")
    _objective(options)
    _pairs(options, "env", "NAME=VALUE")
    endpoint = options.endpoint or os.environ.get("DLROVER_ENDPOINT") or None
    if endpoint is None and (access := _access(options)):
        raise UsageError(
            f"{', '.join(map(_flag, access))}: only with --endpoint; the etcd that is started for this job alone has no users "
            "and no TLS"
        )
    _check_target(options, endpoint)
    prefix = _checked_prefix(options.key_prefix)
    hurry = threading.Event()
    with _signals_as_exceptions(hurry):
        try:
            with (
                _run_folder(options.run_dir / run_id, run_id, endpoint, options.target) as folder,
                contextlib.ExitStack() as stack,
            ):
                server = None
                if endpoint is None:
                    server = stack.enter_context(_embedded_etcd(options, folder))
                    place = JobPlace(run_id, server.endpoint, prefix)
                else:
                    place = JobPlace(run_id, endpoint, prefix, _access(options) or access_from(os.environ))
                return _run_job(options, script, place, folder, server, hurry)
        except _EtcdLostError as error:
            complain(str(error))
            return EXIT_FAILED
        except _Interrupted as interrupted:
            name = signal.Signals(interrupted.signal_number).name
            complain(f"job {run_id} was ended by {name}; nothing it started is left")
            return 128 + interrupted.signal_number


_MEANT_FOR = {
    **dict.fromkeys([*_NODE_OPTIONS, "cpus", "mem"], _TARGETS),
    **dict.fromkeys(["work_dir", "notice", "etcd_host"], ("slurm", "kubernetes")),
    **dict.fromkeys([*_SLURM_OPTIONS, "sbatch_arg"], ("slurm",)),
    **dict.fromkeys([*_KUBERNETES_OPTIONS, *_REPEATED_OPTIONS, "plain_jobs"], ("kubernetes",)),
}
"""Targets that an option means something for; the others, for any."""


def _surrounding_target(options: argparse.Namespace) -> str:
    """Where nodes belong when nobody says it. What was given for another place is meant for the same command there."""
    from lightning_dlrover.components.targets.kubernetes_api import is_in_pod

    target = "slurm" if "SLURM_JOB_ID" in os.environ else "kubernetes" if is_in_pod() else "local"
    ignored = _meant_for_others(options, target)
    for name in ignored:
        setattr(options, name, None)
    place = {"local": "on this machine", "slurm": "on Slurm", "kubernetes": "on Kubernetes"}[target]
    said = f"nodes run {place}" + (f", where these mean nothing: {', '.join(map(_flag, ignored))}" if ignored else "")
    say(said + ("; `--target local` keeps them on this host" if target != "local" else ""))
    return target


def _meant_for_others(options: argparse.Namespace, target: str) -> list[str]:
    """The options that were given and mean nothing for this target."""
    return [n for n, targets in _MEANT_FOR.items() if getattr(options, n) not in (None, "", []) and target not in targets]


def _check_target(options: argparse.Namespace, endpoint: str | None) -> None:
    """
    Raises:
        UsageError: an option for a scheduler makes no sense, or is given where it means nothing.
    """
    from lightning_dlrover.components.targets.kubernetes_api import is_in_pod

    if given := _meant_for_others(options, options.target):
        raise UsageError(f"{', '.join(map(_flag, given))}: only with --target {' or '.join(_MEANT_FOR[given[0]])}")
    if options.notice is not None and options.notice < 0:
        raise UsageError(f"--notice is {options.notice}; it must be at least 0")
    if options.etcd_host and endpoint is not None:
        raise UsageError(f"--etcd-host is for an etcd of the job's own; this job uses the one at {endpoint}")
    if options.target == "local":
        _check_this_machine(options)
    if options.target == "kubernetes":
        if not options.image and not options.pod_template:
            raise UsageError("--target kubernetes needs the --image that nodes run, or a --pod-template with one")
        _kubernetes_asked_for(options)
        if endpoint is None and not options.etcd_host and not is_in_pod():
            raise UsageError(
                "pods cannot reach an etcd that is started here; name one that they reach with --endpoint HOST:PORT "
                "(examples/kubernetes/etcd.yaml starts one in the cluster, see docs/kubernetes.md), or, if they can reach "
                "this host, its address with --etcd-host"
            )


def _check_this_machine(options: argparse.Namespace) -> None:
    """
    Raises:
        UsageError: this machine has not as much as nodes are to get.
    """
    from lightning_dlrover.components.targets.machine.devices import (
        DEVICES_VARIABLE,
        visible_devices,
    )

    cores = len(os.sched_getaffinity(0))
    limit = max(LEAST_LOCAL_WORKERS, LOCAL_WORKERS_PER_CORE * cores)
    fewest, most = options.workers
    if fewest > limit:
        raise UsageError(
            f"--workers {fewest}:{most}: this machine has {cores} cores, which is enough for {limit} workers at most "
            f"({LOCAL_WORKERS_PER_CORE} per core); ask for fewer, or use --target slurm or kubernetes"
        )
    if most > limit:
        say(f"at most {limit} workers, not {most}: this machine has {cores} cores")
        options.workers = fewest, limit
    low, high = options.cpus or (0, 0)
    if high > cores:
        asked = f"{low}:{high}" if low < high else f"{high}"
        raise UsageError(f"--cpus {asked}, and only {cores} cores may be used here; ask for so many at most")
    if not options.gpus:
        return
    if not re.fullmatch(r"[1-9]\d*", options.gpus):
        raise UsageError(f"--gpus {options.gpus!r} is not a number of GPUs, such as 1")
    each, (_, most), there = int(options.gpus), options.workers, len(visible_devices(os.environ))
    if each * most > there:
        seen = f"{DEVICES_VARIABLE} is {os.environ[DEVICES_VARIABLE]!r}" if DEVICES_VARIABLE in os.environ else "by nvidia-smi"
        raise UsageError(
            f"{most} workers with {each} GPUs each need {each * most}, and {there} are there ({seen}); "
            + (f"--workers 1:{there // each} is what they are enough for" if there >= each else "use fewer, or none")
        )


def _kubernetes_asked_for(options: argparse.Namespace) -> KubernetesOptions:
    """
    Raises:
        UsageError: a value makes no sense.
    """
    import yaml

    from lightning_dlrover.components.targets.kubernetes_pod import (
        KubernetesOptions,
        Mount,
    )

    mounts = [re.fullmatch(r"([^:]+):(/[^:]*)(:ro)?", text) for text in options.mount]
    if None in mounts:
        raise UsageError(f"--mount {options.mount[mounts.index(None)]!r} is not CLAIM:PATH[:ro], such as data:/data:ro")
    if options.gpus and not re.fullmatch(r"([^:]+:)?[1-9]\d*", options.gpus):
        raise UsageError(f"--gpus {options.gpus!r} is not [RESOURCE:]NUMBER, such as 1 or amd.com/gpu:1")
    if options.queue and options.plain_jobs:
        raise UsageError(f"--queue {options.queue} is one of Volcano, which --plain-jobs does without: leave one of them out")
    template: Any = {}
    if options.pod_template:
        try:
            template = yaml.safe_load(Path(options.pod_template).read_text())
        except yaml.YAMLError as error:
            raise UsageError(f"--pod-template {options.pod_template}: it is no YAML: {error}") from error
        if not isinstance(template, dict) or not template.keys() <= {"metadata", "spec", "apiVersion", "kind", "template"}:
            raise UsageError(f"--pod-template {options.pod_template}: it has no `spec` of a pod")
        template = template.get("template", template)
    return KubernetesOptions(
        **{name: getattr(options, name) for name in ("image", "namespace", "service_account", "secret", "image_pull_secret")},
        gpus=options.gpus,
        node_selector=_pairs(options, "node_selector", "LABEL=VALUE"),
        mounts=tuple(Mount(match[1], match[2], bool(match[3])) for match in mounts if match),
        endpoint=options.pod_endpoint,
        work_dir=options.work_dir,
        python=options.python or "python",
        **({"grace_s": options.notice} if options.notice is not None else {}),
        template={name: template[name] for name in ("metadata", "spec") if name in template},
        queue=options.queue,
        plain_jobs=bool(options.plain_jobs),
    )


def _pairs(options: argparse.Namespace, name: str, form: str) -> dict[str, str]:
    """The values of an option that may be repeated.

    Raises:
        UsageError: one of them is not of that form.
    """
    before = r"[A-Za-z_]\w*" if name == "env" else "[^=]+"  # a shell knows no other variables
    if wrong := [text for text in getattr(options, name) if not re.match(f"{before}=", text)]:
        raise UsageError(f"{_flag(name)} {wrong[0]!r} is not {form}")
    return dict(text.split("=", 1) for text in getattr(options, name))


@contextlib.contextmanager
def _embedded_etcd(options: argparse.Namespace, folder: Path) -> Iterator[EmbeddedEtcd]:
    """An etcd of the job's own.

    Nodes at a scheduler live on when we are killed: whoever goes on with the job finds etcd's data where they were, and the
    nodes find etcd. When the job ends in order its data go.

    Raises:
        EtcdServerError: it cannot be started.
        UsageError: it cannot be started where the nodes look for it.
    """
    from lightning_dlrover.rdzv.etcd.config import parse_endpoints
    from lightning_dlrover.rdzv.etcd.server import (
        EmbeddedEtcd,
        EtcdServerError,
    )
    from lightning_dlrover.report.status import (
        JOB_FILE,
        JobNotFoundError,
        read_job_file,
    )

    if options.target == "local":
        with EmbeddedEtcd() as server:
            yield server
        return
    host, port = options.etcd_host or _own_address(), None
    with contextlib.suppress(JobNotFoundError):
        [(host, port)] = parse_endpoints(read_job_file(folder / JOB_FILE).place.endpoint)
        if not _is_own_address(host):
            raise UsageError(
                f"job {folder.name!r} has had its etcd on {host}, and its nodes look for it there: go on with the job on that "
                f"host, not on {socket.gethostname()}; if that is gone, end what is left with `dlrover cancel {folder.name}`, "
                "and name an etcd that outlasts its hosts with --endpoint next time"
            )
    data = folder / "etcd"
    deadline = time.monotonic() + 10.0
    is_over = False
    try:
        while True:
            server = EmbeddedEtcd(data, host=host, port=port)
            try:
                server.start()
                break
            except EtcdServerError:
                # That of a `dlrover run` that was killed a moment ago may still be ending.
                if port is None or time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        with server:
            if not host.startswith("127."):
                say(
                    f"etcd listens on {server.endpoint} for everybody, and ends with this process; --endpoint names one that "
                    "stays, and docs/security.md says how it asks who one is"
                )
            if "VC_TASK_INDEX" in os.environ:
                # TorchX asks for its plugin `svc`, whose network policy lets in pods of the same Job only.
                say(
                    "this pod is of a Job of Volcano's, which may keep nodes away from this etcd: if none comes, use --endpoint"
                )
            yield server
        is_over = True
    finally:
        if is_over or not (folder / JOB_FILE).exists():
            shutil.rmtree(data, ignore_errors=True)


def _own_address() -> str:
    """The address of this host that other hosts see: that of its name, else that on the way out."""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        if not address.startswith("127."):
            return address
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255", 1))  # sends nothing
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def _is_own_address(host: str) -> bool:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _new_run_id(script: Path) -> str:
    name = re.sub(r"[^A-Za-z0-9]+", "-", script.stem).strip("-") or "job"
    return f"{name}-{time.strftime('%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"


def _run_job(
    options: argparse.Namespace,
    script: Path,
    place: JobPlace,
    folder: Path,
    server: EmbeddedEtcd | None,
    hurry: threading.Event,
) -> int:
    """Run the job to its end; whatever the end is, all nodes have ended when this returns or raises."""
    from lightning_dlrover.components.control.controller import (
        Controller,
        Limits,
    )
    from lightning_dlrover.components.control.reconcile import Patience
    from lightning_dlrover.components.targets.target import NodeSpec
    from lightning_dlrover.rdzv.etcd.mirror import Mirror
    from lightning_dlrover.rdzv.etcd.server import EtcdServerError
    from lightning_dlrover.report.status import (
        EVENTS_FILE,
        JOB_FILE,
        EventLog,
        connect,
        first_traceback,
    )

    fewest, most = options.workers
    limits = Limits(fewest, most, *_node_sizes(options))
    spec = NodeSpec(
        script=options.script if options.target == "kubernetes" else str(script),
        script_args=tuple(options.script_args),
        endpoint=place.endpoint,
        run_id=place.run_id,
        prefix=place.prefix,
        min_workers=limits.min_workers,
        max_workers=limits.max_workers,
        max_restarts=options.max_restarts,
        access=place.access,
        environment={**_objective(options), **_pairs(options, "env", "NAME=VALUE")},
        timeouts={name: value for name in _TIMEOUTS if (value := getattr(options, name)) is not None},
    )
    # An agent that may start its worker again needs no worker for as long as that takes.
    patience = Patience(exit_s=180.0) if options.max_restarts else Patience()
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(connect(place))
        _refuse_unusable_job(client, place, is_resumed=(folder / JOB_FILE).exists())
        target = _target(options, spec, folder / "logs", hurry)
        mirror = stack.enter_context(Mirror(client, place.keys.events))
        log = EventLog(mirror, folder / EVENTS_FILE)
        announce = _Announcer(log)
        controller = stack.enter_context(Controller(client, place.keys, target, limits, str(folder), say, patience, hurry))
        place.write(folder, target.name, controller.mark)
        say(
            f"job {place.run_id}: {limits.min_workers} to {limits.max_workers} workers, etcd at {place.endpoint}, "
            f"files in {folder}"
        )
        try:
            while (end := controller.step()) is None:
                if server is not None and not server.is_running():
                    say("the embedded etcd has ended unasked: ending all nodes, as the job cannot go on without it")
                    raise _EtcdLostError(f"job {place.run_id} failed: {_without_etcd(server, options.target)}")
                announce()
                controller.wait(0.2)
        except (_Interrupted, _EtcdLostError):
            # Slurm tells all processes of a job at once to end. Nodes can be ended without etcd, but nobody would learn of it.
            if server is not None and (not server.is_running() or "SLURM_JOB_ID" in os.environ):
                controller.tell_scheduler_to_end_nodes()  # first: there may be little time
                with contextlib.suppress(EtcdServerError):
                    server.restart()
            raise
        finally:
            controller.end_nodes()
            announce()
            log.complete(client)
            if not hurry.is_set():
                _write_report(place.run_id, folder)
        failure = controller.failure_text()
    if end.exit_code:
        complain(f"job {place.run_id} failed: {end.reason}")
        # What workers have reported is about the training only.
        reported = None if end.is_trained else first_traceback(folder / EVENTS_FILE)
        complain(reported or failure, prefix="")
    elif not end.is_trained:
        complain(f"job {place.run_id}: {end.reason}")
    return end.exit_code


class _EtcdLostError(Exception):
    """The job's own etcd has ended while the job ran."""


def _without_etcd(server: EmbeddedEtcd, target: str) -> str:
    """Why the job's own etcd has ended, what is left of the job, and what to do."""
    left = (
        "The job's records are lost with it: the script's checkpoints are still there, but the job begins anew unless "
        "the script is given one of them (ckpt_path). Where --endpoint names an etcd that stays, the same command goes on"
        if target == "local"
        else "The same command goes on from the newest checkpoint"
    )
    return f"the embedded etcd has ended unasked: {server.why_it_ended()}. {left}"


def _target(options: argparse.Namespace, spec: NodeSpec, log_dir: Path, hurry: threading.Event) -> Target:
    if options.log_dir is not None:
        # TorchX gives each run a folder of its own; Slurm's nodes of several jobs would write over each other's files.
        log_dir = options.log_dir if options.target == "local" else options.log_dir / spec.run_id
    log_dir = log_dir.resolve()
    if options.target == "local":
        from lightning_dlrover.components.targets.local import LocalTarget

        target = LocalTarget(spec, log_dir, int(options.gpus or 0), hurry=hurry)
        _install_handlers(hurry)  # TorchX's local scheduler has put its own in place of ours
        return target
    if options.target == "kubernetes":
        from lightning_dlrover.components.targets.kubernetes import KubernetesTarget

        return KubernetesTarget(spec, _kubernetes_asked_for(options), log_dir)
    from lightning_dlrover.components.targets.slurm import (
        SlurmOptions,
        SlurmTarget,
    )

    asked = {name: getattr(options, name) for name in (*_SLURM_OPTIONS, *_NODE_OPTIONS)}
    asked |= {"notice_s": options.notice} if options.notice is not None else {}
    return SlurmTarget(spec, SlurmOptions(**asked, extra=tuple(options.sbatch_arg)), log_dir)


def _refuse_unusable_job(client: EtcdClient, place: JobPlace, is_resumed: bool) -> None:
    """
    Raises:
        UsageError: the job has ended, or what etcd holds under its name is not a job's.
    """
    from lightning_dlrover.report.status import (
        JobNotFoundError,
        read_job,
    )

    try:
        found = read_job(client, place.keys)
    except JobNotFoundError:
        return  # the usual case: nobody has used the name yet
    if found.problems:
        raise UsageError(f"job {place.run_id!r} cannot be run under this name: {found.problems[0]}")
    job = found.view.job
    # Where a controller acts for the job, it is the one to be named: `Controller` refuses then.
    is_others = found.view.workers and not is_resumed and client.get(place.keys.controller) is None
    if job is not None and job.phase == "training" and is_others:
        raise UsageError(
            f"job {place.run_id!r} is training already in the etcd at {place.endpoint}, with {len(found.view.workers)} workers "
            "that others have started; choose another --rdzv-id, or use `dlrover scale` to resize it"
        )
    if job is not None and job.phase in ("finished", "failed"):
        raise UsageError(f"job {place.run_id!r} has {job.phase} in the etcd at {place.endpoint}; choose another --rdzv-id")


class _Announcer:
    """Says what has happened; that nothing changes, and why, once per settings."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._stays_at: object = None

    def __call__(self) -> None:
        for event in self._log.new():
            if event.kind == "decision":
                chosen, current = event.data.get("chosen"), event.data.get("current")
                if chosen == current == self._stays_at:
                    continue
                self._stays_at = chosen if chosen == current else None
            if event.kind in ("round", "decision", "scale", "loss", "resume", "straggler", "memory", "hang") and event.text:
                say(printable(f"[{event.kind}] {event.text}"))


def _write_report(run_id: str, folder: Path) -> None:
    from lightning_dlrover.report.page import (
        summary_text,
        write_report,
    )
    from lightning_dlrover.report.status import (
        EVENTS_FILE,
        read_event_file,
    )

    file = folder / EVENTS_FILE
    events = read_event_file(file) if file.exists() else []
    if not any(event.kind == "round" for event in events):
        return  # nothing was trained; an empty report would only hide the error
    try:
        write_report(run_id, events, folder / "report.html")
    except OSError as error:
        complain(f"no report was written: {error}")
        return
    say(printable(summary_text(run_id, events)))
    say(f"report: {folder / 'report.html'}")


def _checked_script(text: str) -> Path:
    script = Path(text)
    if not script.is_file():
        raise UsageError(f"script {text!r} does not exist or is not a file (looked in {Path.cwd()})")
    try:
        ast.parse(script.read_bytes(), filename=text)
    except OSError as error:
        raise UsageError(f"script {text!r} cannot be read: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"script {text!r} is not valid Python: {error}") from error
    return script.resolve()


def _access(options: argparse.Namespace) -> dict[str, str]:
    """The options that say who we are, by the names of `EtcdConfig`.

    Raises:
        UsageError: a file cannot be read, or its path cannot be handed to the agents.
    """
    access = {name: getattr(options, name) for name in ("user", "password_file", "ca_cert", "cert", "cert_key")}
    for name in set(access) - {"user"}:
        if access[name] is not None:
            access[name] = os.path.abspath(access[name])  # nodes may run in another folder
            if not os.access(access[name], os.R_OK):
                raise UsageError(f"{_flag(name)} {access[name]!r} does not exist or cannot be read")
    return {name: value for name, value in access.items() if value is not None}


def _checked_prefix(text: str | None) -> str:
    from lightning_dlrover.rdzv.job.records import DEFAULT_PREFIX

    prefix = text or os.environ.get("DLROVER_PREFIX") or DEFAULT_PREFIX
    # The agents are given it in --rdzv-conf, where ',' and '=' have a meaning.
    if not re.fullmatch(r"(/[^/,=\s]+)+/?", prefix):
        raise UsageError(f"--key-prefix {prefix!r} must start with '/' and hold no ',', '=', '//' or space, such as /dlrover")
    return prefix.rstrip("/")


@contextlib.contextmanager
def _run_folder(folder: Path, run_id: str, endpoint: str | None, target: str) -> Iterator[Path]:
    """The run folder of a job, locked while the job runs.

    Raises:
        UsageError: a job runs in it, or it is another job's.
    """
    from lightning_dlrover.report.status import (
        JOB_FILE,
        JobNotFoundError,
        read_job_file,
    )

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a")
    except OSError as error:
        raise UsageError(f"folder {str(folder)!r} cannot be used: {error.strerror}; choose another --run-dir") from error
    with lock:
        deadline = time.monotonic() + 1.0
        while not (is_ours := _try_to_lock(lock)) and time.monotonic() < deadline:
            time.sleep(0.05)  # whoever asks whether a job runs here holds the lock for a moment, too
        if not is_ours:
            who = "another `dlrover run`"
            with contextlib.suppress(JobNotFoundError):
                who = f"process {read_job_file(folder / JOB_FILE).pid} on {socket.gethostname()}"
            raise UsageError(
                f"job {run_id!r} is already run by {who} (folder {folder}); choose another --rdzv-id, "
                "or use `dlrover scale` to resize it"
            )
        if any(each.name != ".lock" for each in folder.iterdir()):
            former = None
            with contextlib.suppress(JobNotFoundError):
                former = read_job_file(folder / JOB_FILE).place.endpoint
            # A job whose controller was killed goes on where its etcd still is, or its data are.
            has_data = target != "local" and former is not None and (folder / "etcd").is_dir()
            if former != endpoint if endpoint is not None else not has_data:
                raise UsageError(f"{folder} holds an earlier job's files; choose another --rdzv-id, or remove the folder")
        try:
            yield folder.resolve()
        finally:
            # A job that was refused leaves nothing that would refuse the next attempt.
            if [each.name for each in folder.iterdir()] == [".lock"]:
                (folder / ".lock").unlink()
                folder.rmdir()


@contextlib.contextmanager
def _signals_as_exceptions(hurry: threading.Event) -> Iterator[None]:
    former = {number: signal.getsignal(number) for number in _SIGNALS}
    _install_handlers(hurry)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _install_handlers(hurry: threading.Event) -> None:
    def hasten(number: int, frame: FrameType | None) -> None:
        hurry.set()

    def interrupt(number: int, frame: FrameType | None) -> None:
        # Ending everything in order takes seconds; a second signal must not break that off, only hasten it.
        for each in _SIGNALS:
            signal.signal(each, hasten)
        raise _Interrupted(number)

    for each in _SIGNALS:
        signal.signal(each, interrupt)


# --- other commands ------------------------------------------------------------------------------------------------------


def _scale(options: argparse.Namespace) -> int:
    from lightning_dlrover.report.status import (
        connect_to_job,
        find_job,
        read_job,
    )

    place = find_job(options.job, options.endpoint, options.key_prefix, options.run_dir, _access(options))
    with connect_to_job(place, options.run_dir) as client:
        found = read_job(client, place.keys)
        _tell_problems(found.problems)
        _check_can_be_planned(place, found.view, options.num_workers)
        settings = {name: value for name in _COUNTED if (value := getattr(options, name)) is not None}
        if options.num_workers is None and not settings:
            asked = ", ".join(f"--{_option(name)}" for name in _COUNTED)
            raise UsageError(f"nothing was asked for: give a number of workers, or one of {asked}")
        _check_node_size(place, found.nodes, settings)
        wanted = _wanted_text(options.num_workers, settings)
        _plan_by_hand(client, place, found.view, options.num_workers, settings, f"set to {wanted} by hand")
    show(f"job {place.run_id}: {wanted} wanted; `dlrover status {place.run_id}` shows how far they are")
    return EXIT_OK


def _wanted_text(num_workers: int | None, settings: Mapping[str, int]) -> str:
    wanted = ", ".join(f"{value} {_COUNTED[name]}" for name, value in settings.items())
    return wanted if num_workers is None else f"{num_workers} workers" + (f", {wanted} each" if wanted else "")


def _check_node_size(place: JobPlace, nodes: NodesRecord | None, asked: Mapping[str, int]) -> None:
    """
    Raises:
        UsageError: nodes of the job may not be of that size.
    """
    limits = {"node_cpus": (0, 0), "node_memory_mb": (0, 0)}
    if nodes is not None:
        limits = {
            "node_cpus": (nodes.min_cpus, nodes.max_cpus),
            "node_memory_mb": (nodes.min_memory_mb, nodes.max_memory_mb),
        }
    for name, (low, high) in limits.items():
        if name in asked and not 0 < low <= asked[name] <= high:
            has = f"for nodes of {low} to {high} {_COUNTED[name]}" if high else "without limits for it"
            raise UsageError(
                f"job {place.run_id!r} was started {has} (--{_option(name)} of `dlrover run`); "
                f"{asked[name]} {_COUNTED[name]} are outside of that"
            )


def _check_can_be_planned(place: JobPlace, view: View, num_workers: int | None) -> None:
    """Refuse a plan that nobody would carry out.

    Raises:
        UsageError: the job does not train, or was not started for so many workers.
    """
    if view.job is None:
        raise UsageError(f"job {place.run_id!r} has not started training yet; try again in a moment")
    if view.job.phase in ("finished", "failed"):
        raise UsageError(f"job {place.run_id!r} has {view.job.phase}; there is nothing to scale")
    low, high = view.job.min_workers, view.job.max_workers
    if num_workers is not None and not low <= num_workers <= high:
        raise UsageError(f"job {place.run_id!r} was started for {low} to {high} workers, {num_workers} is outside of that")


def _plan_by_hand(
    client: EtcdClient, place: JobPlace, view: View, num_workers: int | None, settings: dict[str, Any], reason: str
) -> None:
    """Write a plan that the job's own planner leaves alone; what is not asked for stays as it was planned."""
    from lightning_dlrover.rdzv.etcd.operations import (
        Put,
        absent,
        modified,
    )
    from lightning_dlrover.rdzv.job.records import (
        EventRecord,
        PlanRecord,
        RecordError,
        decode,
        encode,
    )

    assert view.job is not None
    while True:
        entry = client.get(place.keys.plan)
        unchanged = modified(place.keys.plan) == entry.mod_revision if entry else absent(place.keys.plan)
        plan = PlanRecord(len(view.survivors) or view.job.min_workers, "user", reason, binding=False)
        with contextlib.suppress(RecordError):  # what cannot be read is replaced
            plan = decode(PlanRecord, entry.value, place.keys.plan) if entry else plan
        if num_workers is not None:
            plan = replace(plan, num_workers=num_workers, binding=True)
        plan = replace(plan, **settings, source="user", reason=reason, decision_id=0, created_at=time.time())
        if client.txn([unchanged], [Put(place.keys.plan, encode(plan))]).succeeded:
            break
    event = EventRecord("scale", time.time(), reason, {"num_workers": plan.num_workers, "source": "user", **settings})
    client.put(f"{place.keys.events}{time.time_ns():020d}-cli-{socket.gethostname()}", encode(event))


def _divide(options: argparse.Namespace) -> int:
    from lightning_dlrover.planner.cluster import ClusterJob, divide, options_of
    from lightning_dlrover.planner.plan import Decision
    from lightning_dlrover.report.status import (
        connect_to_job,
        find_job,
        read_events,
        read_job,
    )

    with contextlib.ExitStack() as stack:
        jobs, running, devices = [], {}, {}
        for name, weight in options.jobs:
            place = find_job(name, options.endpoint, options.key_prefix, options.run_dir, _access(options))
            client = stack.enter_context(connect_to_job(place, options.run_dir))
            view = read_job(client, place.keys).view
            _check_can_be_planned(place, view, None)
            events = read_events(client.get_prefix(place.keys.events)[1])
            newest = next((event for event in reversed(events) if event.kind == "decision"), None)
            if newest is None:
                raise UsageError(
                    f"job {name!r} has not said yet what it would gain: its planner, which needs a DLRoverCallback, decides "
                    f"for the first time after some steps; `dlrover explain {name}` shows when it has"
                )
            decision = Decision.from_data(newest.data)
            able = options_of(decision)
            if not able:
                raise UsageError(f"job {name!r} does not know how many cores its workers have; it cannot share a budget")
            jobs.append(ClusterJob(name, able, weight))
            running[name] = place, client, view, decision.current
            devices[name] = "GPUs" if any(c.gpus for c in decision.candidates) else "cores"
        if len(set(devices.values())) > 1:
            listed = ", ".join(f"{name} {unit}" for name, unit in devices.items())
            raise UsageError(f"these jobs do not compete for the same: {listed}; divide those of one kind at a time")
        shares = divide(jobs, options.budget)
        for name, share in shares.items():
            _check_can_be_planned(running[name][0], running[name][2], share.settings.num_workers)
        for job in jobs:
            share, (place, client, view, current) = shares[job.name], running[job.name]
            settings = {name: getattr(share.settings, name) for name in _SETTINGS}
            wanted, unit = _wanted_text(share.settings.num_workers, settings), devices[job.name]
            now = next((o for o in job.options if o.settings == current), None)
            beside = f", {share.samples_per_s / now.samples_per_s:.2f} times as many as now" if now else ""
            show(f"job {job.name}: {wanted}: {share.cost:g} {unit}, {share.samples_per_s:.4g} samples/s{beside}")
            if options.apply:
                reason = f"its share of {options.budget:g} {unit} among {len(jobs)} jobs: {wanted}"
                _plan_by_hand(client, place, view, share.settings.num_workers, settings, reason)
    if not options.apply:
        show("nothing was changed; --apply makes these the jobs' plans")
    return EXIT_OK


def _drain(options: argparse.Namespace) -> int:
    from lightning_dlrover.rdzv.job.records import (
        DrainRecord,
        encode,
    )
    from lightning_dlrover.report.status import (
        connect_to_job,
        find_job,
        read_job,
    )

    place = find_job(options.job, options.endpoint, options.key_prefix, options.run_dir, _access(options))
    with connect_to_job(place, options.run_dir) as client:
        view = read_job(client, place.keys).view
        if options.worker not in view.workers:
            known = ", ".join(view.workers) or "none"
            raise UsageError(f"job {place.run_id!r} has no worker {options.worker!r}; its workers are: {known}")
        if options.replace and client.get(place.keys.controller) is None:
            raise UsageError(
                f"job {place.run_id!r} has no controller that would start another worker; start one by hand, and when "
                f"`dlrover status {place.run_id}` shows it ready, drain {options.worker!r} without --replace"
            )
        if options.replace and options.worker in view.drains:
            raise UsageError(
                f"{options.worker!r} of job {place.run_id!r} has been asked to leave at once, and may not be able to wait"
            )
        is_last = options.worker in view.survivors and not set(view.survivors) - {options.worker, *view.drains}
        if is_last and not options.replace:
            raise UsageError(
                f"{options.worker!r} is the only worker of job {place.run_id!r} that stays: without it the job would stop; "
                f"`dlrover scale {place.run_id} 2` first"
            )
        request = DrainRecord(options.worker, "asked for by `dlrover drain`", once_replaced=options.replace)
        client.put(place.keys.drains + options.worker, encode(request))
    when = " when another worker is ready" if options.replace else ""
    show(f"job {place.run_id}: {options.worker} will hand over and leave{when}")
    return EXIT_OK


def _cancel(options: argparse.Namespace) -> int:
    from lightning_dlrover.rdzv.etcd.errors import EtcdUnavailableError
    from lightning_dlrover.report.status import (
        JOB_FILE,
        JobNotFoundError,
        connect,
        find_job,
        is_locked,
        read_job,
        read_job_file,
    )

    place = find_job(options.job, options.endpoint, options.key_prefix, options.run_dir, _access(options))
    deadline = time.monotonic() + options.timeout
    try:
        client = connect(place)
    except EtcdUnavailableError:
        # An embedded etcd ends with its `dlrover run`; nodes at a scheduler do not.
        folder = options.run_dir / options.job
        silent = f"the etcd of job {place.run_id!r} at {place.endpoint} does not answer"
        try:
            job = read_job_file(folder / JOB_FILE)
        except JobNotFoundError:
            raise UsageError(f"{silent}; start it first") from None
        if is_locked(folder):
            raise UsageError(
                f"{silent}, and `dlrover run` (process {job.pid}) looks after the job: it would start again what is cancelled; "
                "end it with Ctrl-C"
            ) from None
        if job.target == "local":
            raise UsageError(
                f"{silent}, so nobody can be told to end it; its nodes end with the `dlrover run` that has started them, "
                f"process {job.pid}"
            ) from None
        count = _cancel_by_name(place, job.target, job.mark, deadline)
        show(f"job {place.run_id}: its etcd does not answer; {count} nodes were still there and have ended now")
        return EXIT_OK
    with client:
        view = read_job(client, place.keys).view  # says so if there is no such job
        is_over = view.job is not None and view.job.phase in ("finished", "failed")
        nodes = _ask_all_to_end(client, place.keys, "cancelled by `dlrover cancel`")
        has_etcd = _wait_for_controller(client, place, options, deadline, nodes.target)
        _cancel_by_name(place, nodes.target, nodes.mark, deadline)
        if has_etcd and not is_over:
            _let_workers_leave(client, place, deadline)
            _mark_as_cancelled(client, place.keys)
            client.delete(place.keys.plan)
            client.delete_prefix(place.keys.drains)
    what = "had ended already; no node of it is left" if is_over else "cancelled, all its nodes have ended"
    show(f"job {place.run_id}: {what}")
    return EXIT_OK


def _wait_for_controller(
    client: EtcdClient, place: JobPlace, options: argparse.Namespace, deadline: float, target: str
) -> bool:
    """Return once the job has no controller; False if its etcd has ended with that.

    Raises:
        UsageError: it still has one.
        EtcdUnavailableError: nobody knows.
    """
    from lightning_dlrover.rdzv.etcd.errors import EtcdUnavailableError
    from lightning_dlrover.report.status import is_locked

    folder = options.run_dir / options.job
    was_locked = is_locked(folder)
    try:
        while client.get(place.keys.controller) is not None:
            if time.monotonic() > deadline:
                raise UsageError(
                    f"job {place.run_id!r} was asked to end, but its controller has not ended within {options.timeout:g} s; "
                    "see its output, or kill it and cancel once more"
                )
            time.sleep(0.2)
    except EtcdUnavailableError:
        # A scheduler is asked for what is left; of nodes on another machine nobody can tell.
        if is_locked(folder) or not (was_locked or target != "local"):
            raise
        return False
    return True


def _ask_all_to_end(client: EtcdClient, keys: Keys, reason: str) -> NodesRecord:
    """Let the job's controller, present or future, end all nodes."""
    from lightning_dlrover.rdzv.etcd.operations import (
        Put,
        modified,
    )
    from lightning_dlrover.rdzv.job.records import (
        NodesRecord,
        decode,
        encode,
    )

    while True:
        entry = client.get(keys.nodes)
        # A job that torchrun has started has no nodes of ours.
        nodes = decode(NodesRecord, entry.value, entry.key) if entry else NodesRecord("local", "")
        nodes = replace(nodes, stop=nodes.stop or reason)
        revision = entry.mod_revision if entry else 0
        if client.txn([modified(keys.nodes) == revision], [Put(keys.nodes, encode(nodes))]).succeeded:
            return nodes


def _cancel_by_name(place: JobPlace, kind: str, mark: str, deadline: float) -> int:
    """End what a scheduler knows of a job, and say how many nodes that were.

    Raises:
        UsageError: they have not ended in time.
    """
    from lightning_dlrover.components.targets.target import NodeSpec

    spec = NodeSpec("", (), place.endpoint, place.run_id, place.prefix, 1, 1)
    target: Target
    if kind == "slurm":
        from lightning_dlrover.components.targets.slurm import (
            SlurmOptions,
            SlurmTarget,
        )

        target = SlurmTarget(spec, SlurmOptions(), Path(), poll_s=0.5)
    elif kind.startswith("kubernetes"):
        from lightning_dlrover.components.targets.kubernetes import known_target

        target = known_target(spec, kind, None, poll_s=0.5)
    else:
        return 0  # nodes on this machine end with their `dlrover run`
    target.open(mark)
    cancelled: dict[str, float] = {}  # and when
    while living := [app.handle for app in target.apps() if app.is_living]:
        if time.monotonic() > deadline:
            raise UsageError(f"job {place.run_id!r}: {kind} was told to end {', '.join(living)}, but still lists them")
        if due := [handle for handle in living if time.monotonic() - cancelled.get(handle, -60.0) >= 30.0]:
            target.cancel(due)
            cancelled |= dict.fromkeys(due, time.monotonic())
        time.sleep(0.1)
    return len(cancelled)


def _let_workers_leave(client: EtcdClient, place: JobPlace, deadline: float) -> None:
    """End a job's workers that no controller has started, as far as they live.

    Raises:
        UsageError: they have not ended in time.
    """
    from lightning_dlrover.rdzv.job.records import (
        DrainRecord,
        encode,
    )
    from lightning_dlrover.report.status import read_job

    # The records of those that have just been killed go with their leases.
    while workers := read_job(client, place.keys).view.workers:
        for worker in workers:
            if client.get(place.keys.drains + worker) is None:
                client.put(place.keys.drains + worker, encode(DrainRecord(worker, "cancelled by `dlrover cancel`")))
        if time.monotonic() > deadline:
            raise UsageError(f"job {place.run_id!r}: its workers were asked to leave and have not: {', '.join(workers)}")
        time.sleep(0.2)


def _mark_as_cancelled(client: EtcdClient, keys: Keys) -> None:
    """Let whoever asks later, or wants to join, know."""
    from lightning_dlrover.rdzv.etcd.operations import (
        Put,
        modified,
    )
    from lightning_dlrover.rdzv.job.records import (
        JobRecord,
        decode,
        encode,
    )

    while (entry := client.get(keys.job)) is not None:
        job = decode(JobRecord, entry.value, entry.key)
        if job.phase in ("finished", "failed"):
            return
        failed = encode(replace(job, phase="failed", message="cancelled by `dlrover cancel`"))
        if client.txn([modified(keys.job) == entry.mod_revision], [Put(keys.job, failed)]).succeeded:
            return


def _logs(options: argparse.Namespace) -> int:
    from lightning_dlrover.components.targets.logs import (
        LogFile,
        log_files,
    )

    with contextlib.ExitStack() as stack:
        output = _output(options, stack)
        if options.follow:
            _follow(options, output)
            return EXIT_OK
        output.fetch_all()
        for node, files in log_files(output.folder).items():
            for file in files:
                for line in LogFile(file).new_lines(whole=True):
                    print(f"[{node}] {line}")
    return EXIT_OK


@dataclass(frozen=True)
class _Output:
    """A folder with the nodes' output, and how it comes there if no `dlrover run` writes it; either may raise TargetError."""

    folder: Path
    fetch: Callable[[], None] = lambda: None  # have it brought there in the background
    fetch_all: Callable[[], None] = lambda: None  # bring all that there is


def _output(options: argparse.Namespace, stack: contextlib.ExitStack) -> _Output:
    """Where a job's output is: in a folder of this machine or a shared one, else with its scheduler.

    Raises:
        UsageError: on another machine.
    """
    from lightning_dlrover.components.targets.target import NodeSpec
    from lightning_dlrover.rdzv.etcd.errors import EtcdError
    from lightning_dlrover.report.status import (
        JobNotFoundError,
        connect,
        find_job,
        read_job,
    )

    folder = options.log_dir or options.run_dir / options.job / "logs"
    if options.log_dir is not None and (options.log_dir / options.job).is_dir():
        folder = options.log_dir / options.job  # as of --target slurm
    if folder.is_dir():
        return _Output(folder)
    missing = f"folder {str(folder)!r} does not exist; name the one of the job's output with --log-dir, or --run-dir"
    if options.log_dir is not None:
        raise UsageError(missing)
    try:
        place = find_job(options.job, options.endpoint, options.key_prefix, options.run_dir, _access(options))
        with connect(place) as client:
            job = read_job(client, place.keys)
    except (EtcdError, JobNotFoundError) as error:
        raise UsageError(f"{missing}, or the etcd of a job on Kubernetes with --endpoint ({error})") from error
    if job.nodes is not None and job.nodes.target.startswith("kubernetes"):
        from lightning_dlrover.components.targets.kubernetes import known_target

        copies = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dlrover-logs-")))
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()) if options.follow else ""
        spec = NodeSpec("", (), place.endpoint, place.run_id, place.prefix, 1, 1)
        target = known_target(spec, job.nodes.target, copies, output_since=since)
        stack.callback(target.close)
        target.open(job.nodes.mark)
        return _Output(copies, lambda: target.copy_output(timeout_s=0.0), lambda: target.copy_output(timeout_s=60.0))
    theirs = Path(job.controller.run_dir) / "logs" if job.controller and job.controller.run_dir else None
    if theirs is not None and job.controller is not None:
        if theirs.is_dir():
            return _Output(theirs)  # a shared folder
        missing += f"; its `dlrover run` on {job.controller.host} writes to {theirs}, unless it was given a --log-dir"
    raise UsageError(missing)


def _follow(options: argparse.Namespace, output: _Output) -> None:
    """Print what nodes print from now on, until the job is over.

    Raises:
        UsageError: a file, or the scheduler, has not given it for a minute.
    """
    from lightning_dlrover.components.targets.logs import (
        LogFile,
        log_files,
    )
    from lightning_dlrover.components.targets.target import TargetError
    from lightning_dlrover.rdzv.etcd.errors import EtcdError
    from lightning_dlrover.report.status import (
        JobNotFoundError,
        connect,
        find_job,
        is_locked,
    )

    files_read: dict[Path, LogFile] = {}
    for files in log_files(output.folder).values():
        for file in files:
            files_read[file] = LogFile(file)
            files_read[file].skip()
    with contextlib.ExitStack() as stack:
        is_over = False
        client: EtcdClient | None = None
        place = None
        failing_since: float | None = None
        while not is_over or failing_since is not None:
            # Asked before the files are read: what is printed last is read, too.
            if client is None:
                with contextlib.suppress(EtcdError, JobNotFoundError):
                    place = find_job(options.job, options.endpoint, options.key_prefix, options.run_dir, _access(options))
                    client = stack.enter_context(connect(place, timeout_s=2.0))
            ranks, found_over = _ranks(client, place) if client and place else ({}, None)
            # An etcd that does not answer does not end a job; that nobody looks after it any more does, where that can be seen.
            folder = options.run_dir / options.job
            problem: Exception | None = None
            if found_over is not None:
                is_over = found_over
            elif folder.exists():
                is_over = not is_locked(folder)
            else:
                is_over, problem = False, UsageError(f"no etcd says whether job {options.job!r} is over")
            found: dict[str, list[Path]] = {}
            try:
                (output.fetch_all if is_over else output.fetch)()
                found = log_files(output.folder)
            except (OSError, TargetError) as error:
                problem = error
            for node, files in found.items():
                for file in files:
                    try:
                        lines = list(files_read.setdefault(file, LogFile(file)).new_lines(whole=is_over))
                    except OSError as error:
                        lines, problem = [], error  # those of others are shown all the same
                    for line in lines:
                        print(f"[{node}{ranks.get(node, '')}] {line}", flush=True)
            if problem is None:
                failing_since = None
            elif failing_since is None:
                failing_since = time.monotonic()
                complain(f"output cannot be read now ({problem}); trying again for {_OUTPUT_S:.0f} s")
            elif time.monotonic() - failing_since > _OUTPUT_S:
                raise UsageError(f"output cannot be read for {_OUTPUT_S:.0f} s: {problem}") from problem
            if not is_over or problem is not None:
                time.sleep(0.5)


def _ranks(client: EtcdClient, place: JobPlace) -> tuple[dict[str, str], bool | None]:
    """What is said of each node that takes part in the current round, and whether the job is over; None: etcd does not tell."""
    from lightning_dlrover.rdzv.etcd.errors import EtcdError
    from lightning_dlrover.report.status import (
        JobNotFoundError,
        read_job,
    )

    try:
        view = read_job(client, place.keys).view
        controller = client.get(place.keys.controller)
    except (EtcdError, JobNotFoundError):
        return {}, None
    is_over = view.job is not None and view.job.phase in ("finished", "failed") and not view.agents
    if view.round is None:
        # Nodes that have never come to the point of registering leave no record that says so.
        nobody = view.job is None and not view.agents and controller is None
        return {}, None if nobody else is_over
    ranks = {}
    for global_rank, worker in enumerate(view.round.members):
        record = view.workers.get(worker)
        agent = view.agents.get(record.agent_id) if record else None
        if agent is not None:
            ranks[agent.labels.get("node", "")] = f" rank {global_rank} round {view.round.number}"
    return ranks, is_over


def _try_to_lock(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _stacks(options: argparse.Namespace) -> int:
    from lightning_dlrover.rdzv.live.requests import (
        ask_for_stacks,
        read_stacks,
    )
    from lightning_dlrover.report.status import (
        connect_to_job,
        find_job,
        read_job,
    )

    place = find_job(options.job, options.endpoint, options.key_prefix, options.run_dir, _access(options))
    with connect_to_job(place, options.run_dir) as client:
        view = read_job(client, place.keys).view
        if not view.survivors:
            raise UsageError(f"job {place.run_id!r} has no workers that train; `dlrover status {place.run_id}` tells why")
        deadline = time.monotonic() + options.timeout
        while (request := ask_for_stacks(client, place.keys, "dlrover stacks", "asked for by `dlrover stacks`")) is None:
            if time.monotonic() > deadline:
                raise UsageError(f"workers of job {place.run_id!r} ask each other again and again; try again in a moment")
        while True:
            answers = {w: a for w, a in read_stacks(client, place.keys).items() if a.request >= request.number}
            missing = [w for w in view.survivors if w not in answers]
            if not missing or time.monotonic() > deadline:
                break
            time.sleep(0.1)
    for answer in sorted(answers.values(), key=lambda a: a.global_rank):
        waits = ", waits for others in a collective" if answer.in_collective else ""
        show(
            f"{answer.worker_id} (rank {answer.global_rank}, {answer.host}:{answer.pid}, in {answer.phase} "
            f"since {answer.since_s:.1f} s{waits}) is at {answer.place}\n{answer.stacks}\n"
        )
    for worker in missing:
        show(f"{worker} has not answered within {options.timeout:g} s: it has no DLRoverCallback, was stopped, or runs C code")
    return EXIT_FAILED if missing else EXIT_OK


def _status(options: argparse.Namespace) -> int:
    from lightning_dlrover.perf.samples import StepProfile
    from lightning_dlrover.rdzv.job.records import (
        RecordError,
        decode,
    )
    from lightning_dlrover.report.status import (
        connect_to_job,
        find_job,
        read_events,
        read_job,
        read_nodes,
        show_status,
    )

    place = find_job(options.job, options.endpoint, options.key_prefix, options.run_dir, _access(options))
    with connect_to_job(place, options.run_dir) as client:
        found = read_job(client, place.keys)
        profiles: dict[str, StepProfile] = {}
        for entry in client.get_prefix(place.keys.profiles)[1]:
            with contextlib.suppress(RecordError):
                profiles[entry.key.removeprefix(place.keys.profiles)] = decode(StepProfile, entry.value, entry.key)
        events = read_events(client.get_prefix(place.keys.events)[1])
        nodes = read_nodes(client, place.keys)
    status = show_status(place, found, profiles, events, nodes=nodes)
    show(json.dumps(status, indent=2) if options.json else _status_text(status))
    _tell_problems(found.problems)
    return EXIT_OK


def _tell_problems(problems: list[str]) -> None:
    for problem in problems:
        complain(f"ignored a record: {problem}")


_STAGES = {
    "requested": "was requested from the scheduler",
    "starting": "is being started",
    "importing": "imports what the script needs",
    "building": "builds model and data",
    "ready": "is ready to be admitted",
}


def _status_text(status: dict[str, Any]) -> str:
    limits = f"{status['min_workers']} to {status['max_workers']} workers" if status["min_workers"] else "not known yet"
    lines = [f"job {status['run_id']}: {status['phase']}, {limits}, etcd at {status['endpoint']}"]
    if status["round"]:
        lines.append(f"round {status['round']['number']} ({status['round']['kind']}): {status['round']['reason']}")
    rate = status["samples_per_s"]
    lines.append(
        f"rate: {rate:.0f} samples/s, global batch {status['global_batch_size']}" if rate else "rate: not measured yet"
    )
    plan = status["plan"]
    if plan:
        binding = "" if plan["binding"] else " (a recommendation)"
        each = ", ".join(f"{plan[name]} {counted}" for name, counted in _COUNTED.items() if name in plan)
        binding += f", {each} each" if each else ""
        lines.append(f"plan: {plan['num_workers']} workers{binding}, by {plan['source']}: {plan['reason']}")
    if status["controller"]:
        controller = status["controller"]
        nodes = ", ".join(controller["awaited_nodes"])
        lines.append(
            f"controller: process {controller['pid']} on {controller['host']}, target {controller['target']}"
            + (f"; waits for {nodes} to come" if nodes else "")
        )
        lines += [f"nodes: {controller['held_up']}"] if controller["held_up"] else []
    elif status["target"] not in (None, "local") and (status["phase"] in ("starting", "training") or status["agents"]):
        lines.append(
            f"controller: none; nodes on {status['target']} train on, the same `dlrover run` goes on with them, "
            f"`dlrover cancel {status['run_id']}` ends them"
        )
    for agent in status["agents"]:
        if agent["waits"]:
            gives_up = agent["gives_up_in_s"]
            lines.append(
                f"node {agent['host']}:{agent['pid']} {agent['waits']}, for {agent['for_s']:.0f} s"
                + (f", gives up in {max(0.0, gives_up):.0f} s" if gives_up is not None else "")
            )
    for node in status["joining"]:
        lines.append(f"joining: {node['node']} {_STAGES[node['stage']]}, for {node['for_s']:.0f} s")
    lines.append(f"{'rank':>4}  {'state':<10} {'step':>9}  {'process':<24} worker")
    for worker in status["workers"]:
        rank = "-" if worker["rank"] is None else str(worker["rank"])
        step = f"{worker['step_time_s'] * 1000:.1f} ms" if worker["step_time_s"] else "-"
        process = f"{worker['host']}:{worker['pid']}"
        lines.append(f"{rank:>4}  {worker['state']:<10} {step:>9}  {process:<24} {worker['worker_id']}")
        if worker["waits"]:
            lines.append(f"{'':>4}  {worker['waits']}, for {worker['for_s']:.0f} s")
    if status["events"]:
        lines.append("last events:")
        lines += [f"  {_clock(e['at'])}  {e['kind']:<9} {e['text']}" for e in status["events"]]
    return "\n".join(lines)


def _clock(at: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(at))
    except (ValueError, OverflowError, OSError):  # no calendar has such a day
        return "--:--:--"


def _report(options: argparse.Namespace) -> int:
    from lightning_dlrover.report.page import (
        summary_text,
        write_report,
    )
    from lightning_dlrover.report.status import (
        EVENTS_FILE,
        read_event_file,
    )

    folder = options.run_dir / options.job
    events = _events_of(options) or read_event_file(folder / EVENTS_FILE)  # the latter says what is missing
    output = options.output or folder / "report.html"
    write_report(options.job, events, output)
    show(summary_text(options.job, events))
    show(f"report: {output}")
    return EXIT_OK


def _explain(options: argparse.Namespace) -> int:
    from lightning_dlrover.report.explain import explain_text
    from lightning_dlrover.report.pictures import plans_picture
    from lightning_dlrover.report.story import tell

    events = _events_of(options) or _events_of_history(options)
    story = tell(options.job, events)
    show(explain_text(story, options.plan))
    if story.decisions:
        output = options.output or options.run_dir / options.job / "plans.png"
        output.parent.mkdir(parents=True, exist_ok=True)
        plans_picture(story).savefig(output, dpi=130)
        show(f"picture: {output}")
    return EXIT_OK


def _events_of(options: argparse.Namespace) -> list[EventRecord]:
    """A job's events from etcd, else from its run folder; none if neither knows it."""
    from lightning_dlrover.rdzv.etcd.errors import EtcdError
    from lightning_dlrover.report.status import (
        EVENTS_FILE,
        JobNotFoundError,
        connect,
        find_job,
        read_event_file,
        read_events,
    )

    try:
        place = find_job(options.job, options.endpoint, options.key_prefix, options.run_dir, _access(options))
        with connect(place, timeout_s=2.0) as client:
            if events := read_events(client.get_prefix(place.keys.events)[1]):
                return events
    except (EtcdError, JobNotFoundError):
        if options.endpoint:
            raise
    with contextlib.suppress(JobNotFoundError):
        return read_event_file(options.run_dir / options.job / EVENTS_FILE)
    return []


def _events_of_history(options: argparse.Namespace) -> list[EventRecord]:
    from lightning_dlrover.learn.history import HistoryError

    try:
        with _open_history(options) as history:
            return history.events(_find_in_history(history, options.job)[0].key)
    except (HistoryError, UsageError) as error:
        raise UsageError(f"job {options.job!r} is neither in etcd, nor in {options.run_dir}; {error}") from error


def _open_history(options: argparse.Namespace) -> JobHistory:
    from lightning_dlrover.learn.history import (
        JobHistory,
        history_url,
    )

    url = history_url(options.history)
    if url is None:
        raise UsageError("the job history is switched off; name one with --history, or unset DLROVER_HISTORY")
    return JobHistory(url)


def _find_in_history(history: JobHistory, name: str) -> list[JobEntry]:
    """Jobs of this name or key, the newest first.

    Raises:
        UsageError: there is none.
    """
    found = [job for job in history.jobs() if name in (job.key, job.run_id)]
    if not found:
        raise UsageError(f"the job history knows no job {name!r}; `dlrover history list` shows those it knows")
    return found


def _history_list(options: argparse.Namespace) -> int:
    with _open_history(options) as history:
        jobs = history.jobs()
    for job in jobs:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(job.started_at))
        lasted = f"{job.updated_at - job.started_at:.0f} s"
        tried = f"{job.num_settings} settings measured"
        show(f"{job.key:<44} {when}  {lasted:>9}  {job.outcome:<9} {job.descriptor.device:<8} {tried}")
    if not jobs:
        show("no jobs are remembered yet")
    return EXIT_OK


def _history_show(options: argparse.Namespace) -> int:
    from lightning_dlrover.planner.warm_start import PastJob

    with _open_history(options) as history:
        job = _find_in_history(history, options.job)[0]
        windows, decisions, outcomes = history.windows(job.key), history.decisions(job.key), history.outcomes(job.key)
    show(f"{job.key}: {job.outcome}, {len(windows)} windows, {len(decisions)} plans, {len(outcomes)} of them judged")
    for name, value in vars(job.descriptor).items():
        show(f"  {name.replace('_', ' '):<20} {value if isinstance(value, str) else f'{value:,.6g}'}")
    if windows:
        times = PastJob(job.key, job.updated_at, job.descriptor, windows).step_times_s()
        show("  settings (workers x threads + loader workers each) by median step time, with the newest global batch:")
        for settings, seconds in sorted(times.items(), key=lambda item: item[1]):
            show(f"    {settings.short:<12} {1000 * seconds:8.3g} ms")
    return EXIT_OK


def _history_export(options: argparse.Namespace) -> int:
    from lightning_dlrover.learn.history import export_windows

    with _open_history(options) as history, contextlib.ExitStack() as stack:
        jobs = [_find_in_history(history, name)[0] for name in options.job] or history.jobs()
        output = stack.enter_context(options.output.open("w", newline="")) if options.output else sys.stdout
        count = export_windows(history, jobs, options.format, output)
    print(f"{count} windows of {len(jobs)} jobs" + (f" in {options.output}" if options.output else ""), file=sys.stderr)
    return EXIT_OK


def _list(options: argparse.Namespace) -> int:
    from lightning_dlrover.report.status import list_jobs

    endpoint = options.endpoint or os.environ.get("DLROVER_ENDPOINT")
    jobs = list_jobs(endpoint, options.key_prefix, options.run_dir, _access(options))
    where = f"the etcd at {endpoint}" if endpoint else f"folder {options.run_dir}"
    if not jobs:
        show(f"no jobs in {where}")
        return EXIT_OK
    rows: list[tuple[str, ...]] = [("JOB", "STATE", "TARGET", "WORKERS", "NODES", "CONTROLLER")]
    for job in jobs:
        counts = ("-" if number is None else str(number) for number in (job.num_workers, job.num_nodes))
        rows.append((job.run_id, job.state, job.target or "-", *counts, job.controller or "none"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        show("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return EXIT_OK
