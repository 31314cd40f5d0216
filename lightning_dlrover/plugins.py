"""Find the plug-ins of other packages by their entry points.

`dlrover.commands` adds commands, `dlrover.run` hooks of `dlrover run`, and `dlrover.callbacks` callbacks of training processes.
This package's own add-ons come in the same way, so the core imports none of them. A plug-in that cannot be used is reported
with its distribution where it is used, and affects nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

K = TypeVar("K")

CALLBACKS = "dlrover.callbacks"  # group of the entry points that name a `CallbackPlugin`


class PluginError(Exception):
    """A plug-in cannot be used. The message names its distribution, the cause and the next move."""


@dataclass(frozen=True)
class Plugin:
    """An entry point of a group, not loaded yet."""

    name: str
    distribution: str  # name and version, or several where they claim the same name
    problem: str  # reason why it must not be loaded; "" if it may be
    _point: EntryPoint

    def load(self, kind: type[K]) -> K:
        """Import the plug-in, and return its object.

        Args:
            kind: a protocol that the object must have, checkable at run time.

        Raises:
            PluginError: its import fails, its object is of another kind, or its name is taken.
        """
        if self.problem:
            raise self.error(self.problem)
        try:
            loaded = self._point.load()
        except Exception as error:  # whatever a foreign module raises, its distribution has to be named
            raise self.error(f"{self._point.value} cannot be imported: {type(error).__name__}: {error}") from error
        if isinstance(loaded, type) or not isinstance(loaded, kind):
            raise self.error(f"{self._point.value} is {loaded!r:.80}, which is not a {kind.__name__} ({kind.__module__})")
        return loaded

    def error(self, problem: str) -> PluginError:
        """Return an error that names the distribution."""
        what = f"{self._point.group} {self.name!r} of {self.distribution}"
        return PluginError(f"{what} cannot be used: {problem}; update or uninstall that package")


@runtime_checkable
class CallbackPlugin(Protocol):
    """Adds a callback of Lightning to each Trainer that has a DLRoverCallback, behind that one.

    Its module is imported in every training process, so it should import little.
    """

    def applies(self, environ: Mapping[str, str], /) -> bool:
        """Return whether a process with this environment needs the callback."""
        ...

    def callback(self, trainer: Any, /) -> Any:
        """Return the callback: a `Callback` of the package that the Trainer comes from."""
        ...


def plugins(group: str, taken: Collection[str] = ()) -> list[Plugin]:
    """Return the plug-ins of a group, sorted by name. Nothing of them is imported.

    Args:
        taken: names that no plug-in may have.
    """
    from importlib import metadata  # here, as it takes longer than the rest of a light command's start

    by_name: dict[str, dict[str, EntryPoint]] = {}
    for point in metadata.entry_points(group=group):
        distribution = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unknown distribution"
        by_name.setdefault(point.name, {})[distribution] = point
    found = []
    for name, points in sorted(by_name.items()):
        problem = ""
        if name in taken:
            problem = "lightning-dlrover itself has that name"
        elif len(points) > 1:
            problem = "both have that name"
        elif not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            problem = "its name must be of lower-case letters, digits and hyphens"
        found.append(Plugin(name, " and ".join(points), problem, next(iter(points.values()))))
    return found
