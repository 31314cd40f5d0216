"""List the GPUs visible to this process's programs, without initializing CUDA."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

__all__ = ["DEVICES_VARIABLE", "visible_devices"]

DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"

_LIST_S = 30.0
_DEVICE = re.compile(r"\s*(GPU|MIG)\b.*\(UUID: ([^)\s]+)\)")


def visible_devices(environ: Mapping[str, str]) -> list[str]:
    """Return GPU names in the format of `CUDA_VISIBLE_DEVICES`: those in the variable, else all that the driver lists."""
    if DEVICES_VARIABLE not in environ:
        return _listed()
    found: list[str] = []
    for name in (each.strip() for each in environ[DEVICES_VARIABLE].split(",")):
        # CUDA ignores everything after the first malformed name.
        if not re.fullmatch(r"\d+|(GPU|MIG)-\S+", name):
            break
        found.append(name)
    return list(dict.fromkeys(found))


def _listed() -> list[str]:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_LIST_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []  # no driver, or an unresponsive one: CUDA would find no device either
    return devices_in(done.stdout)


def devices_in(listing: str) -> list[str]:
    """Return the UUIDs in the output of `nvidia-smi -L`. A GPU divided into MIG instances is replaced by its instances."""
    found: list[str] = []
    whole = ""  # last GPU read, while none of its instances has been listed
    for match in filter(None, map(_DEVICE.match, listing.splitlines())):
        if match[1] == "GPU":
            found += [whole] if whole else []
            whole = match[2]
        else:
            found.append(match[2])
            whole = ""
    return found + ([whole] if whole else [])
