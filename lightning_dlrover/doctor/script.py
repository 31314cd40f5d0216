"""Start the dry run of a script in a process of its own, and turn its notes into findings."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_dlrover import variables
from lightning_dlrover.doctor.dry_run import NOTES
from lightning_dlrover.finding import Finding, error, ok
from lightning_dlrover.rdzv.etcd.owned_folder import OwnedFolder
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd, EtcdServerError

__all__ = ["check_script"]

_OUTPUT = "output.txt"
_MARGIN_S = 1.0
"""Seconds before the deadline at which the place of a script that does not end is recorded."""

_END_S = 10.0
"""Seconds for the process to end after the script."""

_OF_OTHER_JOBS = re.compile(
    r"DLROVER_|TORCHELASTIC_|SLURM_|PET_|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|MASTER_(ADDR|PORT)$|\w+_SOCKET_IFNAME$"
)
"""Variables that would give the script a place in another job, or another interface than loopback."""


def check_script(
    script: Path, arguments: Sequence[str] = (), deadline_s: float = 120.0, environ: Mapping[str, str] = os.environ
) -> list[Finding]:
    """Run a script up to its first batch, and return which of its parts a job supports.

    Args:
        deadline_s: limit on the time until the first batch.
    """
    owned = OwnedFolder("dlrover-doctor-")
    folder = Path(owned.name)
    try:
        with EmbeddedEtcd(private=True) as server:
            returned = _run(script, arguments, deadline_s, _environment(environ, server.endpoint), folder)
        return _findings(script, returned, deadline_s, folder)
    except EtcdServerError as problem:
        return [error("script", f"not run, because a job's etcd cannot be started: {problem}", "see the line of etcd")]
    finally:
        owned.cleanup()


def _environment(environ: Mapping[str, str], endpoint: str) -> dict[str, str]:
    """Return the environment of the only worker of a job that one more could join."""
    kept = {name: value for name, value in environ.items() if not _OF_OTHER_JOBS.match(name)}
    return kept | {
        variables.ENDPOINT: endpoint,
        variables.RUN_ID: "doctor",
        variables.AGENT_ID: "doctor",
        variables.MIN_NODES: "1",
        variables.MAX_NODES: "2",
        variables.HISTORY: "off",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "WANDB_MODE": "disabled",
    }


def _run(script: Path, arguments: Sequence[str], deadline_s: float, environ: Mapping[str, str], folder: Path) -> int | None:
    """Run the dry run; return its exit code, None if it had to be ended."""
    module = "lightning_dlrover.doctor.dry_run"
    recorded_at = time.monotonic() + deadline_s - _MARGIN_S  # one clock for all processes of a host
    with (folder / _OUTPUT).open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(folder), str(recorded_at), str(script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,
        )
        try:
            return process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            if _Notes.read(folder / NOTES).end is None:
                return None
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_END_S)
            return 0
        finally:
            # Loader workers, and other children of the script, are in its session.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@dataclass
class _Notes:
    findings: list[Finding] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    end: Mapping[str, str] | None = None

    @staticmethod
    def read(file: Path) -> _Notes:
        notes = _Notes()
        with contextlib.suppress(FileNotFoundError):
            for line in file.read_text().splitlines():
                notes._take(line)
        return notes

    def _take(self, line: str) -> None:
        try:
            values: dict[str, Any] = json.loads(line)
        except ValueError:  # the last line of a process that was killed
            return
        if "finding" in values:
            self.findings.append(Finding(**values["finding"]))
        elif "stage" in values:
            self.stages.setdefault(values["stage"]["name"], values["stage"]["at_s"])
        else:
            self.end = self.end or values["end"]


def _findings(script: Path, returned: int | None, deadline_s: float, folder: Path) -> list[Finding]:
    notes = _Notes.read(folder / NOTES)
    findings = _without_repeats(notes.findings)
    again = f"`python {script}` must reach its first batch; its arguments follow `--`"
    how, text = (notes.end["how"], notes.end["text"]) if notes.end is not None else ("", "")
    if how == "dry run ended":
        return [ok("script", f"{script.name} has trained its first batch after {notes.stages['batch']:.1f} s"), *findings]
    if how == "refused":
        return findings
    if how == "no batch":
        problem = error(
            "script", f"training of {script.name} has ended without a batch", "check its data, max_epochs and limits"
        )
    elif how == "raised":
        problem = error("script", _shortened(text), again)
    elif how in ("returned", "exited") and text in ("", "0"):
        made = "" if "trainer" in notes.stages else ", nor made a Trainer"
        problem = error(
            "script",
            f"{script.name} has ended and never called fit{made}",
            f"call trainer.fit, or loop over World.steps; {again}",
        )
    elif how == "exited":
        problem = error("script", f"{script.name} exited with code {text}: {_last_line(folder / _OUTPUT)}", again)
    elif returned is None:
        where = next((f"; it was {stage}" for stage in notes.stages if stage.startswith("at ")), "")
        text = f"{script.name} has not trained a batch within {deadline_s:g} s{where}"
        problem = error("script", text, "give it less data, or more time with --timeout")
    else:
        ending = signal.Signals(-returned).name if returned < 0 else f"exit code {returned}"
        problem = error("script", f"{script.name} was ended by {ending}: {_last_line(folder / _OUTPUT)}", again)
    return [problem, *findings]


def _without_repeats(findings: Iterable[Finding]) -> list[Finding]:
    """Drop repeated findings: loaders are set up several times."""
    kept: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        kept.setdefault((finding.check, finding.text), finding)
    refused = {finding.check for finding in kept.values() if finding.verdict == "error"}
    return [finding for finding in kept.values() if finding.verdict != "ok" or finding.check not in refused]


def _last_line(output: Path) -> str:
    lines = output.read_text(errors="replace").strip().splitlines()
    return _shortened(lines[-1]) if lines else "it has printed nothing"


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:300]} ..."
