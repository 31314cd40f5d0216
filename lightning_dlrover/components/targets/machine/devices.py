"""Which GPUs the programs of this process see, asked without CUDA."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

__all__ = ["DEVICES_VARIABLE", "visible_devices"]

DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"

_LIST_S = 30.0
_DEVICE = re.compile(r"\s*(GPU|MIG)\b.*\(UUID: ([^)\s]+)\)")


def visible_devices(environ: Mapping[str, str]) -> list[str]:
    """Names of GPUs as `CUDA_VISIBLE_DEVICES` takes them: those that it holds, else all that the driver lists."""
    if DEVICES_VARIABLE not in environ:
        return _listed()
    found: list[str] = []
    for name in (each.strip() for each in environ[DEVICES_VARIABLE].split(",")):
        # To CUDA everything after the first name that makes no sense is not there.
        if not re.fullmatch(r"\d+|(GPU|MIG)-\S+", name):
            break
        found.append(name)
    return list(dict.fromkeys(found))


def _listed() -> list[str]:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_LIST_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []  # no driver, or none that answers: CUDA would find no device either
    return devices_in(done.stdout)


def devices_in(listing: str) -> list[str]:
    """UUIDs in the output of `nvidia-smi -L`; of a GPU that is divided into instances (MIG), theirs in place of its own."""
    found: list[str] = []
    whole = ""  # the last GPU, as long as no instance of it was listed
    for match in filter(None, map(_DEVICE.match, listing.splitlines())):
        if match[1] == "GPU":
            found += [whole] if whole else []
            whole = match[2]
        else:
            found.append(match[2])
            whole = ""
    return found + ([whole] if whole else [])
