"""Make a release: `make release VERSION=0.2.0`.

    .ci/release.py VERSION [--dry-run] [--offline]
    .ci/release.py VERSION --bill DIST --out DIR   only write the bill of materials of distributions that were built elsewhere

1. Refuse a tree with changes, a version that exists, and a changelog without an entry `## VERSION (unreleased)`.
2. In a clone: date the entry, set the version, build the source distribution and the wheel, and check both: by
   `twine check --strict`, and by the tests in `tests/distribution/` of contents, metadata, `pip check`, and a job with the
   installed wheel. Write a software bill of materials in CycloneDX's format: the two files with their hashes, and what they
   require, directly and indirectly, in the releases that the tests ran with.
3. Commit the two changed files, tag the commit `vVERSION`, and leave the distributions in `dist/`.

The repository changes in the third step only, and is as before if that fails. Nothing is pushed or uploaded.
Exit codes: 0: released; 1: a step failed; 2: refused.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

__all__ = ["FailedError", "RefusedError", "bill_of_materials", "changed_files", "main", "record"]

REPOSITORY = Path(__file__).resolve().parent.parent
CHANGELOG = Path("CHANGELOG.md")
VERSION_FILE = Path("lightning_dlrover/_version.py")
CHECKS = "tests/distribution"
PROJECT, PACKAGE = "lightning-dlrover", "lightning_dlrover"
BILL = ".cdx.json"
"""Ending of the bill of materials, a file of the release that no index takes."""

ENDING_S = 30.0
"""Seconds that an interrupted step may take to end."""


class RefusedError(Exception):
    """The repository or the version is not fit for a release."""


class FailedError(Exception):
    """A step of the release failed."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", metavar="VERSION", help="such as 0.2.0 or 0.2.0rc1")
    parser.add_argument("--dry-run", action="store_true", help="build and check, and change nothing")
    parser.add_argument("--offline", action="store_true", help="leave out the checks that need a package index")
    parser.add_argument(
        "--bill", type=Path, metavar="DIST", help="only write the bill of materials of the distributions in DIST"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the bill of --bill (default: DIST)")
    options = parser.parse_args(arguments)
    # As Ctrl-C does, end by an exception, which restores the repository.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if options.bill is not None:
            print(_write_bill(REPOSITORY, options.version, "HEAD", options.bill, options.out or options.bill))
            return 0
        _release(REPOSITORY, options.version, options.dry_run, options.offline)
    except RefusedError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    except FailedError as error:
        print(f"failed, and the repository is as before: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted, and the repository is as before", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def _release(repository: Path, version: str, is_dry_run: bool, is_offline: bool) -> None:
    _refuse_unclean(repository)
    _refuse_existing(repository, version)
    start = _git(repository, "rev-parse", "HEAD").strip()
    branch = _git(repository, "rev-parse", "--abbrev-ref", "HEAD").strip()
    files = changed_files(repository, version, datetime.date.today())
    with tempfile.TemporaryDirectory(prefix="release-") as folder:
        clone, distributions = Path(folder, "clone"), Path(folder, "dist")
        _git(repository, "clone", "--quiet", str(repository), str(clone))
        for path, text in files.items():
            (clone / path).write_text(text, encoding="utf-8")
        _build(clone, distributions)
        _check(clone, distributions, is_offline)
        _write_bill(repository, version, start, distributions, distributions)
        if is_dry_run:
            print(f"{version} can be released from {start[:12]}; this was a dry run, and nothing has changed")
            return
        names = record(repository, version, files, start, distributions)
    uploads = " ".join(f"dist/{name}" for name in names if not name.endswith(BILL))
    print(
        f"released {version}: a commit on {branch}, the tag v{version}, and dist/{', dist/'.join(names)}\n"
        "Nothing has been pushed or uploaded. To publish it:\n"
        f"    git push --atomic REMOTE {branch} v{version}\n"
        f"    {os.path.relpath(sys.executable, repository)} -m uv publish {uploads}\n"
        "To take it back before that:\n"
        f"    git tag -d v{version} && git reset --keep {start[:12]}"
    )


def _refuse_unclean(repository: Path) -> None:
    if changes := _git(repository, "status", "--porcelain").rstrip():
        raise RefusedError(f"the tree has changes; commit or remove them first:\n{changes}")
    if _git(repository, "rev-parse", "--abbrev-ref", "HEAD").strip() == "HEAD":
        raise RefusedError("HEAD is on no branch; check out the branch that gets the release's commit")


def _refuse_existing(repository: Path, version: str) -> None:
    """Refuse versions that are malformed, or not above every release so far."""
    try:
        wanted = Version(version)
    except InvalidVersion:
        raise RefusedError(f"{version!r} is no version; one is written like 0.2.0 or 0.2.0rc1") from None
    if str(wanted) != version or wanted.local is not None:
        raise RefusedError(f"{version!r} is not how an index writes a version; write {wanted.public}")
    tags = _git(repository, "tag", "--list", "v*").split()
    released = [Version(tag[1:]) for tag in tags if re.fullmatch(r"v\d[\w.]*", tag)]
    if wanted in released:
        raise RefusedError(f"{version} has been released: there is the tag v{version}")
    if released and wanted < max(released):
        raise RefusedError(f"{version} is below {max(released)}, which has been released")


def changed_files(repository: Path, version: str, date: datetime.date) -> dict[Path, str]:
    """Return the texts of the files that a release changes: the entry of the changelog dated, and the version set.

    Raises:
        RefusedError: the changelog has no entry for the version, an empty one, or one that has a date.
    """
    changelog = (repository / CHANGELOG).read_text(encoding="utf-8")
    heading = re.search(rf"^## {re.escape(version)}\b(?![.\w]).*$", changelog, re.MULTILINE)
    if heading is None:
        raise RefusedError(f"{CHANGELOG} has no entry '## {version} (unreleased)'")
    if heading[0] != f"## {version} (unreleased)":
        raise RefusedError(f"the entry of {CHANGELOG} is {heading[0]!r}, not '## {version} (unreleased)'")
    entry = re.split(r"^## ", changelog[heading.end() :], maxsplit=1, flags=re.MULTILINE)[0]
    if not re.search(r"^[^#\s]", entry, re.MULTILINE):
        raise RefusedError(f"the entry of {CHANGELOG} for {version} is empty")
    dated = f"{changelog[: heading.start()]}## {version} ({date.isoformat()}){changelog[heading.end() :]}"
    return {CHANGELOG: dated, VERSION_FILE: f'__version__ = "{version}"\n'}


def _build(clone: Path, distributions: Path) -> None:
    """Build the source distribution and, from it, the wheel, with the setuptools that is installed here."""
    options = ["--quiet", "--offline", "--no-build-isolation", "--python", sys.executable]
    _run(clone, "uv", "build", *options, "--out-dir", str(distributions), str(clone))
    (distributions / ".gitignore").unlink(missing_ok=True)


def _check(clone: Path, distributions: Path, is_offline: bool) -> None:
    """Run the clone's tests of distributions with those that were built, and with the version that they have."""
    _run(clone, "twine", "check", "--strict", *map(str, sorted(distributions.iterdir())))
    online = {} if is_offline else {"DLROVER_ALL_FAULTS": "1"}
    tests = [f"{CHECKS}/test_wheel.py", f"{CHECKS}/test_fresh_install.py"]
    _run(clone, "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests, DLROVER_DIST=str(distributions), **online)


def _write_bill(repository: Path, version: str, commit: str, distributions: Path, folder: Path) -> Path:
    """Write the bill of materials into a folder; return its path."""
    at = int(_git(repository, "show", "--no-patch", "--format=%ct", commit))
    bill = json.dumps(bill_of_materials(distributions, version, at), indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{PACKAGE}-{version}{BILL}"
    path.write_text(bill, encoding="utf-8")
    return path


def bill_of_materials(distributions: Path, version: str, at: int) -> dict[str, Any]:
    """Return the software bill of materials of built distributions, in CycloneDX 1.6.

    Args:
        distributions: folder of the wheel and the source distribution.
        at: time of the commit, seconds since the epoch; equal inputs give equal bills.

    Raises:
        FailedError: a requirement is not installed here.
    """
    [wheel] = distributions.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Metadata.from_email(archive.read(name), validate=True)
    own = _purl(PROJECT, version)
    components: dict[str, dict[str, Any]] = {}
    depends_on: dict[str, list[str]] = {}
    left = [(own, metadata.requires_dist or [], frozenset[str]())]
    visited: set[tuple[str, frozenset[str]]] = set()
    while left:
        dependent, requirements, extras = left.pop()
        found = depends_on.setdefault(dependent, [])
        for requirement in requirements:
            markers = [{"extra": extra} for extra in extras or {""}]
            if requirement.marker is not None and not any(map(requirement.marker.evaluate, markers)):
                continue
            try:
                installed = importlib.metadata.distribution(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                raise FailedError(f"{requirement.name}, which {dependent} requires, is not installed here") from None
            purl = _purl(installed.name, installed.version)
            if purl not in found:
                found.append(purl)
            components[purl] = _component(installed, purl)
            if (purl, wanted := frozenset(requirement.extras)) not in visited:
                visited.add((purl, wanted))
                left.append((purl, [Requirement(text) for text in installed.requires or []], wanted))
    files = [
        {
            "type": "file",
            "bom-ref": each.name,
            "name": each.name,
            "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(each.read_bytes()).hexdigest()}],
        }
        for each in sorted(distributions.iterdir())
        if each.name.endswith((".whl", ".tar.gz"))
    ]
    main: dict[str, Any] = {"type": "library", "bom-ref": own, "name": PROJECT, "version": version, "purl": own}
    main |= {"licenses": [{"license": {"id": str(metadata.license_expression)}}], "components": files}
    timestamp = datetime.datetime.fromtimestamp(at, datetime.timezone.utc).isoformat().replace("+00:00", "Z")
    digest = hashlib.sha256(json.dumps([main, components], sort_keys=True).encode()).hexdigest()
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, digest)}",
        "version": 1,
        "metadata": {"timestamp": timestamp, "component": main},
        "components": [components[purl] for purl in sorted(components)],
        "dependencies": [{"ref": ref, "dependsOn": sorted(depends_on[ref])} for ref in sorted(depends_on)],
    }


def _component(installed: importlib.metadata.Distribution, purl: str) -> dict[str, Any]:
    component: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": installed.name, "version": installed.version}
    stated = installed.metadata.json
    if expression := stated.get("license_expression"):
        component["licenses"] = [{"expression": expression}]
    elif isinstance(name := stated.get("license"), str) and 0 < len(name) <= 80 and "\n" not in name:
        component["licenses"] = [{"license": {"name": name}}]
    return {**component, "purl": purl}


def _purl(name: str, version: str) -> str:
    return f"pkg:pypi/{canonicalize_name(name)}@{quote(version, safe='')}"


def record(repository: Path, version: str, files: dict[Path, str], start: str, distributions: Path) -> list[str]:
    """Commit the changed files, tag the commit, and put the distributions into `dist/`. On any failure undo all of it.

    Args:
        start: commit that was checked.
        distributions: folder of the files for `dist/`.

    Returns:
        Names of the files in `dist/`.

    Raises:
        RefusedError: the repository has changed since it was checked.
        FailedError: a command failed.
    """
    _refuse_unclean(repository)
    _refuse_existing(repository, version)
    if (now := _git(repository, "rev-parse", "HEAD").strip()) != start:
        raise RefusedError(f"HEAD has moved from {start[:12]} to {now[:12]} while the release was checked; start again")
    dist = repository / "dist"
    had_dist = dist.exists()
    targets = {each: dist / each.name for each in sorted(distributions.iterdir())}
    if present := [str(target) for target in targets.values() if target.exists()]:
        raise RefusedError(f"{', '.join(present)} would be overwritten; remove what was built before")
    try:
        dist.mkdir(exist_ok=True)
        for source, target in targets.items():
            shutil.copyfile(source, target)
        for path, text in files.items():
            (repository / path).write_text(text, encoding="utf-8")
        _git(repository, "commit", "--quiet", "--message", f"Release {version}", "--", *map(str, files))
        _git(repository, "tag", "--annotate", "--message", f"lightning-dlrover {version}", f"v{version}")
    except BaseException:  # Ctrl-C, too
        if _git(repository, "tag", "--list", f"v{version}"):
            _git(repository, "tag", "--delete", f"v{version}")
        # `--soft`, as a harder reset would take changes along that somebody has just made to other files.
        _git(repository, "reset", "--quiet", "--soft", start)
        _git(repository, "checkout", "--quiet", start, "--", *map(str, files))
        for target in targets.values():
            target.unlink(missing_ok=True)
        if not had_dist and dist.exists():
            dist.rmdir()
        raise
    return [target.name for target in targets.values()]


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise FailedError(f"`git {arguments[0]}` ended with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _run(folder: Path, module: str, *arguments: str, **variables: str) -> None:
    """Run a module of this environment in a folder, with its output on the terminal."""
    print(f"$ {module} {' '.join(arguments)}", flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen([sys.executable, "-m", module, *arguments], cwd=folder, env={**environment, **variables})
    try:
        code = process.wait()
    except BaseException as error:
        # Pytest ends the processes of its tests when it is interrupted. Ctrl-C in a terminal interrupts it, too.
        if not isinstance(error, KeyboardInterrupt):
            process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S)
        process.kill()
        process.wait()
        raise
    if code:
        raise FailedError(f"`{module}` ended with {code}, see above")


if __name__ == "__main__":
    sys.exit(main())
