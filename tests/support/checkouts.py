"""Copies of the repository as it would be committed now: tracked files, and new ones that are not ignored."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder, without the settings of the user, and return its output."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    identity = {
        f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in (("NAME", "T"), ("EMAIL", "t@t"))
    }
    settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        env={**variables, **identity, **settings},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"git {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def committable_files() -> list[Path]:
    """Paths relative to the repository. Skips the test where the repository is none of git's, as in an unpacked sdist."""
    if not (REPOSITORY / ".git").exists() or shutil.which("git") is None:
        pytest.skip("needs a git checkout")
    listed = git(REPOSITORY, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    return sorted(path for path in map(Path, filter(None, listed)) if os.path.lexists(REPOSITORY / path))


def copy_checkout(folder: Path) -> Path:
    """Copy the files into `folder`, links as links, and return it."""
    for path in committable_files():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / path, folder / path, follow_symlinks=False)
    return folder
