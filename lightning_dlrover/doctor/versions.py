"""Compare installed packages with this package's requirements, with the tested releases, and with each other.

Reads their metadata and imports none of them: a package that does not fit may crash the process that imports it.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterable, Mapping

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from lightning_dlrover.finding import Finding, error, ok, warning
from lightning_dlrover.packages import MALICIOUS
from lightning_dlrover.releases import TESTED, TRIPLES, Triple, minor, tested_text

__all__ = ["check_versions", "installed_versions", "is_safe_to_import"]

_OWN = "lightning-dlrover"
_FBGEMM = ("fbgemm-gpu", "fbgemm-gpu-cpu")


def installed_versions() -> dict[str, str]:
    """Return the versions of all installed distributions by canonical name; the first one on the path counts."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name and distribution.version:
            found.setdefault(canonicalize_name(name), distribution.version)
    return found


def is_safe_to_import(installed: Mapping[str, str]) -> bool:
    """Whether no release is installed that does harm when it is imported."""
    return installed.get("lightning") not in MALICIOUS


def check_versions(
    installed: Mapping[str, str], requirements: Iterable[str] | None = None, python: str | None = None
) -> list[Finding]:
    """Return the findings about Python and packages.

    Args:
        installed: versions by canonical name of the distribution.
        requirements: those of this package; None: as installed.
        python: version of the interpreter; None: of this one.
    """
    if requirements is None:
        requirements = _own_requirements()
    tested, others = _tested({"python": python or ".".join(map(str, sys.version_info[:3])), **installed})
    troubles = [*_requirements(installed, requirements), *others, *_lightning(installed)]
    return [*([ok("packages", ", ".join(tested))] if tested else []), *troubles, *_torchrec(installed)]


def _own_requirements() -> list[str]:
    try:
        return importlib.metadata.requires(_OWN) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _requirements(installed: Mapping[str, str], requirements: Iterable[str]) -> list[Finding]:
    """Find required packages that are missing or too old."""
    unmet = []
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = installed.get(canonicalize_name(requirement.name))
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            unmet.append((f"{requirement.name}{requirement.specifier}", found))
    return [
        error("packages", f"{wanted} is required, {found or 'none'} is installed", f"pip install '{wanted}'")
        for wanted, found in unmet
    ]


def _tested(installed: Mapping[str, str]) -> tuple[list[str], list[Finding]]:
    """Return the packages of tested releases, and the findings about others."""
    fine, findings = [], []
    for name, releases in TESTED.items():
        if (found := installed.get(name)) is None:
            continue
        if minor(found) in releases:
            fine.append(f"{name} {found}")
            continue
        newer = "newer than the tested releases" if _is_newer(found, releases[-1]) else "not among the tested releases"
        what = f"{found} is {newer} ({tested_text(name)})"
        if name == "python":
            findings.append(warning(name, what, f"use Python {releases[-1]} if a job fails on this one"))
        else:
            move = f"if a job fails: pip install '{name}=={releases[-1]}.*', or a newer lightning-dlrover"
            findings.append(warning(name, what, move))
    return fine, findings


def _is_newer(found: str, than: str) -> bool:
    try:
        return Version(minor(found)) > Version(than)
    except InvalidVersion:
        return False


def _lightning(installed: Mapping[str, str]) -> list[Finding]:
    one, other = installed.get("lightning"), installed.get("pytorch-lightning")
    if one in MALICIOUS:
        return [
            error(
                "lightning",
                f"lightning {one} steals credentials when it is imported; it was not imported here",
                "pip uninstall lightning, replace the credentials of this machine, then pip install 'lightning>=2.6.4'",
            )
        ]
    if one is not None and other is not None and one != other:
        return [
            warning(
                "lightning",
                f"lightning {one} and pytorch-lightning {other} are of different releases, which one script cannot mix",
                f"pip install pytorch-lightning=={one}, or import one of them only",
            )
        ]
    return []


def _torchrec(installed: Mapping[str, str]) -> list[Finding]:
    """Check torchrec with fbgemm and torch. No finding where torchrec is not installed: only sharded tables need it."""
    torchrec, torch = installed.get("torchrec"), installed.get("torch")
    if torchrec is None or torch is None:
        return []
    found = [(name, installed[name]) for name in _FBGEMM if name in installed]
    wanted = _FBGEMM[1] if _is_cpu_build(torch, installed) else _FBGEMM[0]
    triple = next((t for t in TRIPLES if t.torchrec == minor(torchrec)), None)
    if len(found) == 2:
        other = _FBGEMM[1 - _FBGEMM.index(wanted)]
        return [
            error(
                "fbgemm",
                f"{found[0][0]} {found[0][1]} and {found[1][0]} {found[1][1]} overwrite each other's files",
                f"pip uninstall -y {other} {wanted}, then {_install(triple or TRIPLES[-1], wanted)}",
            )
        ]
    fitting = next((t for t in TRIPLES if t.torch == minor(torch)), None)
    move = _install(fitting, wanted) if fitting is not None else _install_all(TRIPLES[-1], wanted)
    if not found:
        return [error("fbgemm", f"torchrec {torchrec} needs {wanted}, which is not installed", move)]
    name, fbgemm = found[0]
    if triple is None:
        return [warning("fbgemm", f"torchrec {torchrec} is of no known release of fbgemm and torch", move)]
    wrong = []
    if minor(fbgemm) != triple.fbgemm:
        wrong.append(f"torchrec {torchrec} needs {name} {triple.fbgemm}, {fbgemm} is installed")
    if minor(torch) != triple.torch:
        wrong.append(f"torchrec {torchrec} is built for torch {triple.torch}, {torch} is installed")
    if name != wanted:
        wrong.append(f"{name} does not load with torch {torch}, which needs {wanted}")
    if wrong:
        return [error("fbgemm", "; ".join(wrong), move)]
    return [ok("fbgemm", f"{name} {fbgemm} fits torchrec {torchrec} and torch {torch}")]


def _is_cpu_build(torch: str, installed: Mapping[str, str]) -> bool:
    local = torch.partition("+")[2]
    if local:
        return local == "cpu"
    # PyPI's builds bear no local version: those for Linux on x86 come with CUDA's libraries as packages.
    return not any(re.match(r"nvidia-(cuda|cublas|nccl)", name) for name in installed)


def _install(triple: Triple, fbgemm: str) -> str:
    return f"pip install '{fbgemm}=={triple.fbgemm}.*' && pip install --no-deps 'torchrec=={triple.torchrec}.*'"


def _install_all(triple: Triple, fbgemm: str) -> str:
    return f"pip install 'torch=={triple.torch}.*' && {_install(triple, fbgemm)}"
