"""Import torch, Lightning and torchrec in a process of their own, and check the private names that are in use.

`python -m lightning_dlrover.doctor.imports` is that process: a library that does not fit may crash it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from lightning_dlrover.components.targets.machine import visible_devices
from lightning_dlrover.lightning_compat import PACKAGES, is_installed
from lightning_dlrover.output import Finding, error, ok, warning
from lightning_dlrover.private_names import NCCL_FAILING

_MARK = "dlrover-doctor: "
_DEADLINE_S = 120.0


@dataclass(frozen=True)
class Imported:
    """Outcome of the imports."""

    problems: dict[str, str] = field(default_factory=dict)  # reason why a package cannot be used, by its name
    imported: list[str] = field(default_factory=list)
    cuda: str = ""  # CUDA release of the torch build; empty: none
    nccl: tuple[int, ...] = ()
    num_devices: int = 0  # GPUs usable by torch
    device_problem: str = ""


def import_all(environ: Mapping[str, str] = os.environ, deadline_s: float = _DEADLINE_S) -> Imported:
    """Import the packages in another process, and return its findings."""
    command = [sys.executable, "-m", "lightning_dlrover.doctor.imports"]
    try:
        ran = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline_s,
            stdin=subprocess.DEVNULL,
            env=dict(environ),
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return Imported({"torch": f"the imports have not ended within {deadline_s:g} s"})
    begun, found = "torch", None
    for line in ran.stdout.splitlines():
        if line.startswith(_MARK):
            found = json.loads(line.removeprefix(_MARK))
            begun = found.pop("begun", begun)
    if found is None or "imported" not in found:
        ending = signal.Signals(-ran.returncode).name if ran.returncode < 0 else f"exit code {ran.returncode}"
        last = (ran.stderr.strip().splitlines() or [""])[-1]
        return Imported({begun: f"its import ended the process ({ending}){': ' + last[:200] if last else ''}"})
    return Imported(**{**found, "nccl": tuple(found["nccl"])})


def check_imports(imported: Imported) -> list[Finding]:
    """Return the findings about imports and private names."""
    move = {
        "torchrec": "install torchrec and fbgemm for this torch (docs/guide/tables.md), or uninstall it if no table is sharded"
    }
    findings = [
        error("imports", f"{name}: {problem}"[:400], move.get(name, f"reinstall it: pip install --force-reinstall {name}"))
        for name, problem in imported.problems.items()
    ]
    if imported.imported:
        findings.insert(0, ok("imports", f"{', '.join(imported.imported)} load and have the private names in use"))
    return findings


def check_gpus(imported: Imported, devices: int | None = None, driver: str | None = None) -> Finding:
    """Check that torch can use the GPUs of this host.

    Args:
        devices: number of GPUs that the driver lists; None: to be listed.
        driver: release of the driver; None: to be read.
    """
    num_devices = len(visible_devices(os.environ)) if devices is None else devices
    if num_devices == 0 and imported.num_devices == 0:
        return ok("gpus", "none; torch computes on the CPU")
    text = f"{num_devices} with driver {driver or _driver()}"
    if not imported.cuda:
        move = "install torch's CUDA build (https://pytorch.org/get-started)"
        return warning("gpus", f"{text}, but torch is a CPU build and uses none", move)
    nccl = ".".join(map(str, imported.nccl)) or "none"
    text += f", torch for CUDA {imported.cuda}, NCCL {nccl}"
    if imported.num_devices == 0:
        why = f": {imported.device_problem}" if imported.device_problem else ""
        return error("gpus", f"{text}; torch can use none{why}", "update the driver, or install torch for the driver's CUDA")
    first, last = NCCL_FAILING
    if first <= imported.nccl <= last:
        move = f"pip install 'nvidia-nccl-cu12>{'.'.join(map(str, last))}' (or -cu13), or another torch"
        return warning("gpus", f"{text}, which may crash when a round follows another", move)
    return ok("gpus", text)


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        lines = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
        return lines[0] if lines else "unknown"
    return "unknown"


# --- the process that imports -----------------------------------------------------------------------------------------------


def _report(**values: object) -> None:
    print(_MARK + json.dumps(values), file=sys.__stdout__, flush=True)


def _import_and_report() -> None:
    imported = Imported()
    cuda, nccl, num_devices, device_problem = "", (), 0, ""
    with contextlib.redirect_stdout(io.StringIO()):
        _report(begun="torch")
        try:
            import torch

            from lightning_dlrover.rdzv.transport import torch_names

            torch_names.check()
            imported.imported.append("torch")
        except Exception as problem:
            imported.problems["torch"] = _first_line(problem)
            return _report(**asdict(imported))
        cuda = torch.version.cuda or ""
        try:
            if cuda:
                torch.cuda.init()  # type: ignore[no-untyped-call]
                num_devices = torch.cuda.device_count()
                nccl = tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
        except Exception as problem:
            device_problem = _first_line(problem)
        for package in filter(is_installed, PACKAGES):
            name = package.partition(".")[0]
            _report(begun=name)
            try:
                importlib.import_module(package)
                from lightning_dlrover.live import private_api

                private_api.check(package)
                imported.imported.append(name)
            except Exception as problem:
                imported.problems[name] = _first_line(problem)
        if importlib.util.find_spec("torchrec") is not None:
            _report(begun="torchrec")
            try:
                from lightning_dlrover.tables.torchrec_adapter import check_torchrec

                check_torchrec()
                imported.imported.append("torchrec")
            except Exception as problem:
                imported.problems["torchrec"] = _first_line(problem)
    values = asdict(imported) | {"cuda": cuda, "nccl": nccl, "num_devices": num_devices, "device_problem": device_problem}
    return _report(**values)


def _first_line(problem: Exception) -> str:
    lines = str(problem).splitlines() or [""]
    return f"{type(problem).__name__}: {lines[0]}" if lines[0] else type(problem).__name__


if __name__ == "__main__":
    _import_and_report()
