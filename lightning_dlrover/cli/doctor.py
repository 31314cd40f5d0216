"""`dlrover doctor`: check this machine, its packages, etcd and a script before a job."""

from __future__ import annotations

import argparse
import json
import os
import threading

from lightning_dlrover.cli.errors import EXIT_FAILED, EXIT_OK, Interrupted, UsageError, signals_as_exceptions
from lightning_dlrover.cli.lookup import etcd_access
from lightning_dlrover.cli.options import flag
from lightning_dlrover.cli.run_options import checked_prefix, checked_script, file_of_module
from lightning_dlrover.doctor.report import Case, as_json, examine, lines, summary
from lightning_dlrover.output import show, worst
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from lightning_dlrover.rdzv.job.folders import EtcdDefaults

_ETCD_S = 5.0

_COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


def doctor_command(options: argparse.Namespace) -> int:
    """Show each check as it ends. The exit code is 1 if one of them has found an error."""
    defaults = EtcdDefaults.of_this_process()
    name = options.script[0] if options.script else ""
    if options.module and not name:
        raise UsageError("-m: give the name of the module to check, as in: dlrover doctor -m package.module")
    case = Case(
        etcd=_etcd(options, defaults),
        prefix=checked_prefix(options.key_prefix or defaults.prefix),
        script=checked_script(_file_of(name) if options.module else name) if name else None,
        module=name if options.module else "",
        arguments=options.script[1:],
        deadline_s=options.timeout,
    )
    findings = []
    try:
        with signals_as_exceptions(threading.Event()):
            for finding in examine(case):
                findings.append(finding)
                if not options.json:
                    first, *others = lines(finding)
                    show(first, _COLOURS.get(finding.verdict, ""))
                    for line in others:
                        show(line)
    except Interrupted as interrupted:  # all processes of the checks have been ended on the way
        return 128 + interrupted.signal_number
    show(json.dumps(as_json(findings), indent=2) if options.json else summary(findings))
    return EXIT_FAILED if worst(findings) == "error" else EXIT_OK


def _file_of(module: str) -> str:
    """Return the file of a module. Raise UsageError if it is missing, or not a Python file."""
    if file := file_of_module(module, os.getcwd()):
        return file
    raise UsageError(f"-m {module}: it is not in a Python file, so its first batch cannot be observed")


def _etcd(options: argparse.Namespace, defaults: EtcdDefaults) -> EtcdConfig | None:
    endpoint = options.endpoint or defaults.endpoint
    access = etcd_access(options)
    if endpoint is None:
        if access:
            raise UsageError(f"{', '.join(map(flag, access))}: only with --endpoint, which names the etcd that they are for")
        return None
    return EtcdConfig(endpoint, timeout_s=_ETCD_S, **(access or defaults.access))
