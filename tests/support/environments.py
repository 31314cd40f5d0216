"""Virtual environments that see neither the repository nor the packages of the tests.

A linked one holds exactly what given requirements ask for, and is made in seconds and without a network. Its distributions are
those of the running interpreter, in the versions installed there. Their files are linked, so an environment with torch takes
no disk. A package that is installed for the tests but that no requirement names is absent.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

INSTALL_S = 900.0
"""Seconds within which pip installs torch and all the rest from a package index."""


class NotInstalledError(Exception):
    """A requirement names a distribution that the running interpreter does not have."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment in a folder of its own."""

    folder: Path

    @classmethod
    def create(cls, folder: Path) -> Environment:
        """Create an empty one, without pip."""
        venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
        return cls(folder)

    @classmethod
    def linked(cls, folder: Path, requirements: Iterable[str]) -> Environment:
        """Create one with the distributions that the requirements ask for, directly and indirectly.

        Raises:
            NotInstalledError: one of them is not installed here.
        """
        distributions = required_distributions(requirements)
        environment = cls.create(folder)
        for each in distributions.values():
            _link(each, environment.packages)
        return environment

    @property
    def interpreter(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        """Folder of installed packages."""
        return Path(sysconfig.get_path("purelib", "posix_prefix", {"base": str(self.folder)}))

    def pip(self, *arguments: object) -> str:
        """Run this interpreter's pip on the environment, and return its output."""
        return self._output(
            [sys.executable, "-m", "pip", "--python", str(self.interpreter), *map(str, arguments)], self.variables
        )

    def pip_without_index(self, *arguments: object) -> str:
        """Run pip so that it finds no distribution but those in its arguments."""
        unset = {name: value for name, value in self.variables.items() if not name.startswith("PIP_")}
        command = [sys.executable, "-m", "pip", "--python", str(self.interpreter), *map(str, arguments), "--no-index"]
        return self._output(command, {**unset, "PIP_CONFIG_FILE": os.devnull})

    def run(self, code: str, cwd: Path) -> str:
        """Output of a program, which sees neither the repository nor variables of Python's."""
        return self._output([str(self.interpreter), "-c", code], self.variables, cwd).strip()

    def _output(self, command: list[str], variables: Mapping[str, str], cwd: Path | None = None) -> str:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=variables,
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout

    @property
    def variables(self) -> dict[str, str]:
        """The variables of this process without those that lead to its own packages."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
        own = str(Path(sys.executable).parent)
        folders = [folder for folder in kept.get("PATH", "").split(os.pathsep) if folder != own]
        return {**kept, "PATH": os.pathsep.join([str(self.folder / "bin"), *folders])}


def required_distributions(requirements: Iterable[str]) -> dict[str, Distribution]:
    """Return the installed distributions that requirements ask for, directly and indirectly, by canonical name.

    Raises:
        NotInstalledError: one of them is not installed here.
    """
    found: dict[str, Distribution] = {}
    seen: set[str] = set()
    waiting = [("the requirements", text, {""}) for text in requirements]
    while waiting:
        asker, text, extras = waiting.pop()
        requirement = Requirement(text)
        if requirement.marker is not None and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        key = f"{canonicalize_name(requirement.name)}{sorted(requirement.extras)}"
        if key in seen:
            continue
        seen.add(key)
        try:
            installed = distribution(requirement.name)
        except PackageNotFoundError:
            raise NotInstalledError(f"{asker} ask for {text!r}, which is not installed here") from None
        found[canonicalize_name(requirement.name)] = installed
        waiting += [(requirement.name, each, {"", *requirement.extras}) for each in installed.requires or []]
    return found


def _link(each: Distribution, packages: Path) -> None:
    """Link a distribution's files but its commands, which begin with the path of another interpreter."""
    made: set[Path] = set()
    for file in each.files or []:
        if ".." in file.parts:
            continue
        target = packages / file
        if target.parent not in made:
            target.parent.mkdir(parents=True, exist_ok=True)
            made.add(target.parent)
        source = Path(str(each.locate_file(file)))
        try:
            os.link(source, target)
        except (FileNotFoundError, FileExistsError):
            continue  # a compiled module that was removed since; a file that two distributions have in common
        except OSError:  # on another file system
            target.symlink_to(source)
