"""The source distribution and the wheel, as a release builds them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.metadata import Metadata

GIVEN = "DLROVER_DIST"
"""Variable with a folder that holds a wheel and a source distribution. The tests check these and build none."""

CUDA = re.compile(r"nvidia|cuda|cudnn|triton|^fbgemm-gpu")
"""Names of distributions with libraries for CUDA."""

BUILD_S = 120.0


@dataclass(frozen=True)
class Distributions:
    """A folder with one wheel and one source distribution."""

    folder: Path

    @cached_property
    def wheel(self) -> Path:
        return self._only("*.whl")

    @cached_property
    def sdist(self) -> Path:
        return self._only("*.tar.gz")

    @cached_property
    def metadata(self) -> Metadata:
        """Validated metadata of the wheel.

        Raises:
            ExceptionGroup: a field is missing or malformed.
        """
        [text] = [data for name, data in self.in_wheel.items() if name.endswith(".dist-info/METADATA")]
        return Metadata.from_email(text, validate=True)

    @property
    def requirements(self) -> list[str]:
        return [str(requirement) for requirement in self.metadata.requires_dist or []]

    @cached_property
    def in_wheel(self) -> dict[str, bytes]:
        """Contents by name."""
        with zipfile.ZipFile(self.wheel) as archive:
            return {name: archive.read(name) for name in archive.namelist()}

    @cached_property
    def in_sdist(self) -> set[str]:
        """Names of files and links, relative to the archive's one folder."""
        with tarfile.open(self.sdist) as archive:
            return {member.name.partition("/")[2] for member in archive if not member.isdir()}

    def _only(self, pattern: str) -> Path:
        [found] = self.folder.glob(pattern)
        return found


def build(checkout: Path, folder: Path, *options: str) -> Distributions:
    """Build the source distribution, and the wheel from it, with the packages that are installed here.

    Args:
        checkout: the repository or a copy of it. Setuptools leaves files there.
        folder: where the results are written.
        options: more arguments of `uv build`, such as `--wheel` to build a wheel alone and without a source distribution.
    """
    command = [sys.executable, "-m", "uv", "build", "--quiet", "--offline", "--no-build-isolation", "--python", sys.executable]
    done = subprocess.run(
        [*command, "--out-dir", str(folder), *options, str(checkout)],
        env={name: value for name, value in os.environ.items() if not re.match("UV_|PYTHONPATH$", name)},
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Distributions(folder)
