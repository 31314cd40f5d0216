"""Check the options of `dlrover run`, and convert them to the form that targets take."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import itertools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_dlrover import variables
from lightning_dlrover.cli.errors import UsageError
from lightning_dlrover.cli.options import KUBERNETES_OPTIONS, NODE_OPTIONS, REPEATED_OPTIONS, SLURM_OPTIONS, TARGETS, flag
from lightning_dlrover.components.targets.kubernetes_api import is_in_pod
from lightning_dlrover.components.targets.machine import DEVICES_VARIABLE, visible_devices
from lightning_dlrover.components.targets.target import NodeSize
from lightning_dlrover.output import counted, say
from lightning_dlrover.rdzv.job.sizes import POW2, POWERS_OF_TWO, sizes_within
from lightning_dlrover.spares import SparesError, check_platform
from lightning_dlrover.tuning.history import history_url
from lightning_dlrover.tuning.plan import objective_from

if TYPE_CHECKING:
    from lightning_dlrover.components.targets.kubernetes_manifests import KubernetesOptions

RESTARTS_WITH_SPARES = 3
"""Default of --max-restarts where each agent keeps a spare process for its worker."""

LOCAL_WORKERS_PER_CORE = 4
LEAST_LOCAL_WORKERS = 16
"""Workers that any machine may run, however few cores it has."""

_MEANT_FOR = {
    **dict.fromkeys([*NODE_OPTIONS, "cpus", "mem"], TARGETS),
    **dict.fromkeys(["work_dir", "preemption_notice", "poll_interval", "etcd_host"], ("slurm", "kubernetes")),
    **dict.fromkeys([*SLURM_OPTIONS, "sbatch_arg"], ("slurm",)),
    **dict.fromkeys([*KUBERNETES_OPTIONS, *REPEATED_OPTIONS, "plain_jobs", "no_disruption_budget"], ("kubernetes",)),
}
"""Targets of each option; options that are not listed apply to all."""


def surrounding_target(options: argparse.Namespace) -> str:
    """Return the target that this process runs in, and drop options of other targets: one command may serve several places."""
    target = "slurm" if variables.slurm_job(os.environ) else "kubernetes" if is_in_pod() else "local"
    ignored = _meant_for_others(options, target)
    for name in ignored:
        setattr(options, name, None)
    text = {"local": "nodes run on this machine", "slurm": "nodes run on Slurm", "kubernetes": "nodes run on Kubernetes"}[
        target
    ]
    text += f", where these are ignored: {', '.join(map(flag, ignored))}" if ignored else ""
    say(text + ("; `--target local` keeps them on this host" if target != "local" else ""))
    return target


def _meant_for_others(options: argparse.Namespace, target: str) -> list[str]:
    """Return the given options that do not apply to this target."""
    return [n for n, targets in _MEANT_FOR.items() if getattr(options, n) not in (None, "", []) and target not in targets]


def settle_workers(options: argparse.Namespace) -> None:
    """Replace `gpu` in --workers-per-node by a number, and set the defaults that depend on it.

    Raises:
        UsageError: this number of workers per node does not fit the other options.
    """
    gpus = num_gpus(options)
    if not options.workers_per_node and not gpus:
        raise UsageError("--workers-per-node gpu: --gpus N sets the number of GPUs of each node, and so of its workers")
    each = options.workers_per_node = options.workers_per_node or gpus
    if options.workers is None:
        listed = options.sizes if options.sizes != POWERS_OF_TWO else ()
        options.workers = (listed[0], listed[-1]) if listed else (each, 2 * each)
    if each == 1:
        return
    if any(number % each for number in options.workers):
        fewest, most = (max(1, number // each) * each for number in options.workers)
        raise UsageError(
            f"--workers {options.workers[0]}:{options.workers[1]} counts workers, and each node has {each} "
            f"(--workers-per-node): give multiples of {each}, such as {fewest}:{most}"
        )
    if gpus not in (0, each):
        problem = f"--workers-per-node {each} with --gpus {options.gpus}: each worker has one GPU of its own"
        raise UsageError(f"{problem}; give --gpus {each}, or --workers-per-node gpu")
    for name, unit in (("cpus", ""), ("mem", "M")):
        low, high = getattr(options, name) or (0, 0)
        if low < high:
            raise UsageError(
                f"--{name} {low}{unit}:{high}{unit} with --workers-per-node {each}: only nodes of one worker can be resized; "
                f"give one size for the whole node, such as --{name} {high}{unit}"
            )


def settle_sizes(options: argparse.Namespace) -> None:
    """Check --sizes against the other options, and lower the maximum number of workers to the largest size.

    Raises:
        UsageError: a size contradicts them.
    """
    if not options.sizes:
        return
    (fewest, most), asked = options.workers, options.sizes
    text = POW2 if asked == POWERS_OF_TWO else ",".join(map(str, asked))
    try:
        options.sizes = sizes_within(asked, fewest, most, options.workers_per_node)
    except ValueError as error:
        raise UsageError(f"--sizes {text} with --workers {fewest}:{most}: {error}") from error
    if options.sizes[-1] < most:
        say(f"at most {counted(options.sizes[-1], 'worker')}, not {most}: the largest of --sizes")
        options.workers = fewest, options.sizes[-1]


def settle_spares(options: argparse.Namespace) -> None:
    """Check --spares, and set the default of --max-restarts, which depends on it.

    Raises:
        UsageError: this platform cannot keep spare processes.
    """
    if options.spares and options.target == "local":
        try:
            check_platform()
        except SparesError as error:
            raise UsageError(f"--spares {options.spares}: {error}") from error
    if options.max_restarts is None:
        # Elsewhere a node that has lost its worker would end, and its spare process with it.
        has_own = options.spares and (options.target != "local" or options.workers_per_node > 1)
        options.max_restarts = RESTARTS_WITH_SPARES if has_own else 0


def num_gpus(options: argparse.Namespace) -> int:
    """Return the GPUs of each node; 0 if none were asked for, or the number is malformed."""
    number = re.search(r"\d+$", options.gpus or "")
    return int(number[0]) if number else 0


def check_target(options: argparse.Namespace, endpoint: str | None) -> None:
    """Refuse options that the target cannot serve.

    Raises:
        UsageError: an option has an invalid value, is missing, or does not apply to the target.
        TargetError: this host cannot reach the target.
    """
    if given := _meant_for_others(options, options.target):
        raise UsageError(f"{', '.join(map(flag, given))}: only with --target {' or '.join(_MEANT_FOR[given[0]])}")
    if options.preemption_notice is not None and options.preemption_notice < 0:
        raise UsageError(f"--preemption-notice is {options.preemption_notice}; it must be at least 0")
    if options.etcd_host and endpoint is not None:
        raise UsageError(f"--etcd-host is for an etcd of the job's own; this job uses the one at {endpoint}")
    if num_gpus(options) > 1 and options.workers_per_node == 1:
        say(
            f"--gpus {options.gpus}: each node runs one worker, which trains on one of its GPUs unless its model uses more; "
            "`--workers-per-node gpu` runs one worker for each"
        )
    if options.target == "local":
        _check_this_machine(options)
    elif options.target == "slurm":
        from lightning_dlrover.components.targets.slurm import check_commands

        check_commands()
    else:
        if not options.image and not options.pod_template:
            raise UsageError("--target kubernetes needs the --image that nodes run, or a --pod-template with one")
        kubernetes_options(options)
        if endpoint is None and not options.etcd_host and not is_in_pod():
            raise UsageError(
                "pods cannot reach an etcd that is started here; name one that they reach with --endpoint HOST:PORT "
                "(examples/kubernetes/etcd.yaml starts one in the cluster, see docs/start/kubernetes.md), or, if they can "
                "reach this host, its address with --etcd-host"
            )


def _check_this_machine(options: argparse.Namespace) -> None:
    """Check the resources of nodes against this machine, and lower the maximum number of workers to its limit."""
    cores = len(os.sched_getaffinity(0))
    limit = max(LEAST_LOCAL_WORKERS, LOCAL_WORKERS_PER_CORE * cores)
    limit -= limit % options.workers_per_node
    fewest, most = options.workers
    if fewest > limit:
        enough = (
            f"this machine has {cores} cores, enough for {counted(limit, 'worker')} at most ({LOCAL_WORKERS_PER_CORE} per core)"
        )
        raise UsageError(f"--workers {fewest}:{most}: {enough}; use fewer, or --target slurm or kubernetes")
    if most > limit:
        allowed = [size for size in options.sizes if size <= limit]
        if options.sizes and not allowed:
            enough = f"this machine has {cores} cores, enough for {counted(limit, 'worker')} at most"
            raise UsageError(f"--sizes from {options.sizes[0]} on: {enough}; list smaller ones, or use another --target")
        options.sizes = tuple(allowed)
        limit = allowed[-1] if allowed else limit
        say(f"at most {counted(limit, 'worker')}, not {most}: this machine has {cores} cores")
        options.workers = fewest, limit
    low, high = options.cpus or (0, 0)
    if high > cores:
        given = f"{low}:{high}" if low < high else f"{high}"
        raise UsageError(f"--cpus {given}, but only {cores} cores may be used here; give {cores} at most")
    if options.workers_per_node > 1 and not options.gpus and visible_devices(os.environ):
        options.gpus = str(options.workers_per_node)  # otherwise the workers of two nodes would have the same GPUs
    if not options.gpus:
        return
    if not re.fullmatch(r"[1-9]\d*", options.gpus):
        raise UsageError(f"--gpus {options.gpus!r} is not a number of GPUs, such as 1")
    # With several workers per node, each has one of the node's GPUs.
    each = int(options.gpus) // options.workers_per_node
    (_, most), there = options.workers, len(visible_devices(os.environ))
    if each * most > there:
        enough = there // each // options.workers_per_node * options.workers_per_node
        seen = f"{DEVICES_VARIABLE} is {os.environ[DEVICES_VARIABLE]!r}" if DEVICES_VARIABLE in os.environ else "by nvidia-smi"
        fitting = f"--workers {options.workers_per_node}:{enough} is the most that fits" if enough else "use fewer, or none"
        needs = f"{counted(most, 'worker')} with {counted(each, 'GPU')} each"
        raise UsageError(f"{needs}: {each * most} needed, {there} found ({seen}); {fitting}")


def kubernetes_options(options: argparse.Namespace) -> KubernetesOptions:
    """Return the settings of each node's pod. Raise UsageError for an invalid value."""
    import yaml

    from lightning_dlrover.components.targets.kubernetes_manifests import KubernetesOptions, Mount

    mounts = [re.fullmatch(r"([^:]+):(/[^:]*)(:ro)?", text) for text in options.mount]
    if None in mounts:
        raise UsageError(f"--mount {options.mount[mounts.index(None)]!r} is not CLAIM:PATH[:ro], such as data:/data:ro")
    if options.gpus and not re.fullmatch(r"([^:]+:)?[1-9]\d*", options.gpus):
        raise UsageError(f"--gpus {options.gpus!r} is not [RESOURCE:]NUMBER, such as 1 or amd.com/gpu:1")
    if options.run_as and not re.fullmatch(r"root|\d+(:\d+)?", options.run_as):
        raise UsageError(f"--run-as {options.run_as!r} is not UID[:GID] or root, such as 1000:1000")
    template: Any = {}
    if options.pod_template:
        try:
            template = yaml.safe_load(Path(options.pod_template).read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise UsageError(f"--pod-template {options.pod_template} is not YAML: {error}") from error
        if not isinstance(template, dict) or not template.keys() <= {"metadata", "spec", "apiVersion", "kind", "template"}:
            raise UsageError(f"--pod-template {options.pod_template}: it has no `spec` of a pod")
        template = template.get("template", template)
    return KubernetesOptions(
        **{name: getattr(options, name) for name in ("image", "namespace", "service_account", "secret", "image_pull_secret")},
        gpus=options.gpus,
        node_selector=pairs(options, "node_selector", "LABEL=VALUE"),
        job_labels=pairs(options, "job_label", "NAME=VALUE"),
        job_annotations=pairs(options, "job_annotation", "NAME=VALUE"),
        mounts=tuple(Mount(match[1], match[2], bool(match[3])) for match in mounts if match),
        endpoint=options.pod_endpoint,
        work_dir=options.work_dir,
        python=options.python or "python",
        **({"grace_s": options.preemption_notice} if options.preemption_notice is not None else {}),
        template={name: template[name] for name in ("metadata", "spec") if name in template},
        queue=options.queue,
        run_as=options.run_as,
        plain_jobs=bool(options.plain_jobs),
        keeps_budget=not options.no_disruption_budget,
    )


def pairs(options: argparse.Namespace, name: str, form: str) -> dict[str, str]:
    """Parse the values of an option that may be repeated. Raise UsageError for one that is not of the form `form`."""
    before = r"[A-Za-z_]\w*" if name == "env" else "[^=]+"  # names that a shell accepts
    if wrong := [text for text in getattr(options, name) if not re.match(f"{before}=", text)]:
        raise UsageError(f"{flag(name)} {wrong[0]!r} is not {form}")
    return dict(text.split("=", 1) for text in getattr(options, name))


def node_sizes(options: argparse.Namespace) -> tuple[NodeSize, NodeSize]:
    """Return the smallest and the largest size of a node."""
    default = (0, 0) if options.target == "local" else (options.workers_per_node, options.workers_per_node)
    low, high = zip(options.cpus or default, options.mem or (0, 0), strict=True)
    return NodeSize(*low), NodeSize(*high)


def objective(options: argparse.Namespace) -> dict[str, str]:
    """Return environment variables that carry the user's objective to the nodes' workers.

    Raises:
        ValueError: the options contradict each other.
    """
    given = {"aim": options.objective, "deadline_s": options.deadline, "budget": options.budget, "prices": options.prices}
    exported = {variables.OBJECTIVE[name]: str(value) for name, value in given.items() if value is not None}
    objective_from({**os.environ, **exported})
    if options.history is not None:
        exported[variables.HISTORY] = history_url(options.history) or "off"  # nodes may run in another folder
    return exported


def checked_command(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the script as torchrun takes it, with `-m` before a module and `--no-python` before another program.

    Raises:
        UsageError: it cannot be run.
    """
    form = ("-m",) if options.module else ("--no-python",) if options.no_python else ()
    if options.no_python and options.spares:
        raise UsageError(
            "--spares 1 forks workers from a Python process with the script's modules, which cannot run another program: leave "
            "out --spares 1, or --no-python"
        )
    if options.target == "kubernetes":  # pods have it in their image or in a volume, so it may not exist here
        return *form, options.script
    if options.no_python:
        return *form, checked_program(options.script)
    if not options.module:
        return (str(checked_script(options.script)),)
    if file := file_of_module(options.script, options.work_dir or os.getcwd()):
        checked_script(file)
    return *form, options.script


def checked_program(text: str) -> str:
    """Return the absolute path of a program, or its name if it is found in PATH. Raise UsageError if it cannot be started."""
    if "/" not in text and not os.path.exists(text):
        if shutil.which(text) is None:
            raise UsageError(f"--no-python: there is no program {text!r} in {Path.cwd()}, nor in PATH")
        return text  # nodes may have it in another folder
    program = Path(text).absolute()
    if not program.is_file():
        raise UsageError(f"--no-python: program {text!r} does not exist or is not a file (looked in {Path.cwd()})")
    if not os.access(program, os.X_OK):
        raise UsageError(
            f"--no-python: {text!r} cannot be executed; run `chmod +x {shlex.quote(text)}`, or leave out --no-python"
        )
    return str(program)


def file_of_module(name: str, folder: str) -> str:
    """Return the file that `python -m` would run in a folder; empty if it is not a Python file. No module is imported."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"-m {name!r} is not the name of a module: give it as in `import`, without a path and without '.py'")
    places: Sequence[str] | None = [folder, *sys.path]
    found: ModuleSpec | None = None
    for parent in itertools.accumulate(name.split("."), "{}.{}".format):
        found = PathFinder.find_spec(parent, places) if places is not None else None
        if found is None and "." not in parent:
            found = importlib.util.find_spec(parent)  # a package that was installed for editing
        if found is None:
            raise UsageError(f"-m {name}: there is no {parent!r} in {folder}, nor among the installed packages")
        places = found.submodule_search_locations
    if places is not None:
        return file_of_module(f"{name}.__main__", folder)
    return found.origin if found is not None and found.origin and found.origin.endswith(".py") else ""


def checked_script(text: str) -> Path:
    """Return the absolute path of the script. Raise UsageError if it is missing, unreadable or not valid Python."""
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


def checked_prefix(prefix: str) -> str:
    """Return the folder of all jobs' keys in etcd, without a slash at its end. Raise UsageError if it is malformed."""
    # Agents receive the prefix in --rdzv-conf, where ',' and '=' are separators.
    if not re.fullmatch(r"(/[^/,=\s]+)+/?", prefix):
        raise UsageError(f"--key-prefix {prefix!r} must start with '/' and hold no ',', '=', '//' or space, such as /dlrover")
    return prefix.rstrip("/")
