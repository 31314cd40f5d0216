"""Private names of other packages that this one uses, and the releases in which they were checked."""

from __future__ import annotations

import dis
import importlib
import importlib.metadata
import inspect
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType

from lightning_dlrover._version import __version__

# The releases of other packages that this one was tested with, as data. Extend it when `make test-versions` passes on
# another.
#
# The lowest releases are the requirements in `pyproject.toml`; this module holds the highest ones, and the pairs.

TESTED: dict[str, tuple[str, ...]] = {
    "python": ("3.10", "3.11", "3.12", "3.13"),
    "torch": ("2.11", "2.12", "2.13", "2.14", "2.15"),
    "lightning": ("2.5", "2.6"),
    "pytorch-lightning": ("2.5", "2.6"),
    "torchrec": ("1.7", "1.8", "1.9"),
    "torchx": ("0.7",),
}
"""Minor releases of Python and of distributions, in ascending order: those whose private or changing parts are in use."""


@dataclass(frozen=True)
class Triple:
    """Minor releases that are built for each other."""

    torchrec: str
    fbgemm: str  # fbgemm-gpu, and fbgemm-gpu-cpu for CPU builds of torch
    torch: str


TRIPLES: tuple[Triple, ...] = (
    Triple("1.7", "1.7", "2.12"),
    Triple("1.8", "1.8", "2.13"),
    Triple("1.9", "1.9", "2.14"),
)
"""Published triples of torchrec, fbgemm and torch, in ascending order."""

NCCL_FAILING: tuple[tuple[int, int, int], tuple[int, int, int]] = ((2, 28, 3), (2, 28, 8))
"""First and last release of NCCL that crashes when a process aborts its groups and forms others."""


def minor(version: str) -> str:
    """Return the minor release of a version: 2.13 of 2.13.0+cpu."""
    return ".".join(version.partition("+")[0].split(".")[:2])


def tested_text(distribution: str) -> str:
    """Return the tested releases of a distribution for a message, such as "2.12 to 2.13"; empty if none is listed."""
    releases = TESTED.get(distribution, ())
    return releases[0] if len(releases) == 1 else " to ".join((releases[0], releases[-1])) if releases else ""


# Check that an installed package has the private names that this one uses, and name those that it lacks in one message.
#
# The lists are where the names are used: `rdzv/transport/torch_names.py`, `live/private_api.py`,
# `tables/torchrec_adapter.py`, `data/rows.py`. Each is checked once per process, before its first use. An attribute that
# only instances have is found in the code of their class, or of the module that sets it.

STORE_ATTR = dis.opmap["STORE_ATTR"]

Names = Mapping[str, Iterable[str]]
"""Private names by their holder: ``module`` or ``module:Class``."""


class MissingNamesError(ImportError):
    """An installed release lacks private names that this package uses."""

    def __init__(self, distribution: str, missing: Iterable[str]) -> None:
        tested = tested_text(distribution)
        advice = f"tested with {tested}: pip install '{distribution}=={tested.split()[-1]}.*'" if tested else "not tested"
        super().__init__(
            f"{distribution} {_version(distribution)} lacks {', '.join(missing)}, which lightning-dlrover {__version__} uses "
            f"({advice}, or install a newer lightning-dlrover)"
        )


def check_names(distribution: str, names: Names, root: str = "", optional: Container[str] = ()) -> None:
    """Raise `MissingNamesError` for the names that an installed package lacks.

    Args:
        root: package that the modules in `names` belong to; empty if they are absolute.
        optional: holders, and names as ``HOLDER.NAME``, that the installed release need not have.
    """
    if missing := missing_names(names, root, optional):
        raise MissingNamesError(distribution, missing)


def missing_names(names: Names, root: str = "", optional: Container[str] = ()) -> list[str]:
    """Return the missing names with their holders. Imports the modules."""
    found = []
    for holder, listed in names.items():
        module, _, kind = (f"{root}.{holder}" if root else holder).partition(":")
        owner: object = None
        try:
            owner = importlib.import_module(module)
            for part in filter(None, kind.split(".")):
                owner = getattr(owner, part)
        except (ModuleNotFoundError, AttributeError) as error:
            if isinstance(error, ModuleNotFoundError) and not module.startswith(error.name or " "):
                raise  # a dependency of the package is missing, not one of its names
            if holder not in optional:
                found.append(".".join(filter(None, (module, kind))))
            continue
        needed = [name for name in listed if f"{holder}.{name}" not in optional]
        found += [f"{'.'.join(filter(None, (module, kind)))}.{name}" for name in needed if not _has(owner, name)]
    return found


def _has(owner: object, name: str) -> bool:
    if hasattr(owner, name):
        return True
    return any(_sets(each, name) for each in (owner.__mro__ if inspect.isclass(owner) else (owner,)))


def _sets(owner: object, name: str) -> bool:
    """Whether a function of a class or module sets an attribute of this name, or a class declares it."""
    members = getattr(owner, "__dict__", {})
    if inspect.isclass(owner) and name in members.get("__annotations__", {}):
        return True
    return any(_stores(code, name) for member in members.values() if (code := _code_of(member)) is not None)


def _code_of(member: object) -> CodeType | None:
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, classmethod | staticmethod):
        member = member.__func__
    return inspect.unwrap(member).__code__ if isinstance(member, FunctionType) else None


def _stores(code: CodeType, name: str) -> bool:
    if name not in code.co_names:
        return False
    number, high = code.co_names.index(name), 0
    # Each instruction is two bytes. `dis` would describe all of them, which takes a worker's start a tenth of a second.
    for operation, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = high << 8 | low
        if operation == STORE_ATTR and argument == number:
            return True
        high = argument if operation == dis.EXTENDED_ARG else 0
    return False


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "(of unknown version)"
