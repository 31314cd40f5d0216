"""Build a folder that tests the package on a machine with a GPU and without a network: `make gpu-bundle PY=3.12`.

    .ci/gpu_bundle.py --python 3.12 [--out build/gpu-bundle]

The folder has our wheel, tests and benchmarks, the wheels that such a machine lacks, and `run.sh`. Pip chooses the wheels by
the metadata of our wheel: its requirements, and theirs, for that Python, up to what a machine with a CUDA build of torch has.
`gpu_parts.py` runs in the folder.
"""

from __future__ import annotations

import argparse
import email
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_parts import GPU_TESTS
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import NormalizedName, canonicalize_name, parse_wheel_filename

__all__ = ["BARE", "BundleError", "download_missing", "lacking", "main"]

REPOSITORY = Path(__file__).resolve().parent.parent
MAX_BYTES = 50_000_000

BARE = {
    *("torch", "lightning", "pytorch-lightning", "numpy", "scipy", "scikit-learn", "matplotlib", "pyarrow", "pytest"),
    *("pytest-timeout", "hypothesis", "grpcio", "protobuf", "nvidia-ml-py"),
}
"""Distributions that a bare machine with a GPU has, in versions that fit its torch."""

NEVER = re.compile(r"torch|triton|cuda|cudnn|nvidia-.*|fbgemm-.*")
"""Distributions that no bundle carries: they have to fit the machine's CUDA, and are too large."""

FOR_TESTS = {"pytest-xdist", "trustme", "jsonargparse", "tensorboardx"}
"""Distributions of the extra `dev` that tests with the mark `gpu`, their fixtures or benchmarks import."""

COPIED = ("pyproject.toml", "tests", "benchmarks", "examples", ".ci")
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")


class BundleError(Exception):
    """The bundle cannot be built."""


# --- wheels ----------------------------------------------------------------------------------------------------------------


def requirements_of(wheel: Path) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        metadata = email.message_from_bytes(archive.read(name))
    return [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]


def lacking(wheels: Iterable[Path], wanted: Sequence[Requirement], python: str) -> dict[str, Requirement]:
    """Return the requirements, by name, that neither these wheels nor a bare machine meet.

    Args:
        wanted: what is required beside the requirements of the wheels, with extras.

    Raises:
        BundleError: two requirements exclude each other, or one is for a distribution that is never carried.
    """
    environment: dict[str, Any] = {**default_environment(), "python_version": python, "python_full_version": f"{python}.0"}
    have = {(parsed := parse_wheel_filename(wheel.name))[0]: (parsed[1], wheel) for wheel in wheels}
    specifiers: dict[NormalizedName, SpecifierSet] = {}
    extras: dict[NormalizedName, set[str]] = {}
    waiting: list[tuple[str, Requirement, set[str]]] = [("the bundle", requirement, {""}) for requirement in wanted]
    waiting += [(str(name), each, {""}) for name, (_, wheel) in have.items() for each in requirements_of(wheel)]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        asker, requirement, of_extras = waiting.pop()
        name = canonicalize_name(requirement.name)
        is_asked = requirement.marker is None or any(
            requirement.marker.evaluate({**environment, "extra": extra}) for extra in of_extras
        )
        if not is_asked or name in BARE:
            continue
        if NEVER.fullmatch(name):
            raise BundleError(f"{asker} requires {requirement}, which no bundle carries; a machine with a GPU must have it")
        specifiers[name] = specifiers.get(name, SpecifierSet()) & requirement.specifier
        extras.setdefault(name, set()).update(requirement.extras)
        if requirement.extras and name in have and (key := (name, frozenset(requirement.extras))) not in seen:
            seen.add(key)
            waiting += [(name, each, set(requirement.extras)) for each in requirements_of(have[name][1])]
    found: dict[str, Requirement] = {}
    for name, specifier in specifiers.items():
        if name not in have:
            listed = f"[{','.join(sorted(extras[name]))}]" if extras[name] else ""
            found[name] = Requirement(f"{name}{listed}{specifier}")
        elif not specifier.contains(have[name][0], prereleases=True):
            raise BundleError(f"the wheel of {name} {have[name][0]} does not meet {specifier}; pin it in pyproject.toml")
    return found


def download_missing(folder: Path, wanted: Sequence[Requirement], python: str) -> None:
    """Let pip choose and download wheels into `folder`, until nothing is lacking.

    Raises:
        BundleError: pip finds no wheel, or what it finds does not fit together.
    """
    while missing := lacking(folder.glob("*.whl"), wanted, python):
        before = set(folder.iterdir())
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--dest",
            str(folder),
        ]
        command += ["--python-version", python, "--implementation", "cp"]
        command += [word for platform in PLATFORMS for word in ("--platform", f"{platform}_x86_64")]
        _run([*command, *map(str, missing.values())])
        if set(folder.iterdir()) == before:
            raise BundleError(f"pip has downloaded nothing for {', '.join(map(str, missing.values()))}")


def wanted_for_tests(wheel: Path) -> list[Requirement]:
    """Return what the tests need of the extra `dev` of our wheel."""
    found = {canonicalize_name(each.name): each for each in requirements_of(wheel) if 'extra == "dev"' in str(each.marker)}
    wanted = [each for name, each in sorted(found.items()) if name in FOR_TESTS]
    for each in wanted:
        each.marker = None
    return wanted


# --- the folder ------------------------------------------------------------------------------------------------------------


def build(out: Path, python: str) -> None:
    shutil.rmtree(out, ignore_errors=True)
    wheels = out / "wheels"
    wheels.mkdir(parents=True)
    for name in COPIED:
        _copy(REPOSITORY / name, out / name)
    shutil.copyfile(REPOSITORY / ".ci" / "gpu_parts.py", out / "parts.py")
    shutil.copyfile(REPOSITORY / ".ci" / "gpu_run.sh", out / "run.sh")
    (out / GPU_TESTS).write_text("\n".join(files_with_gpu_tests()) + "\n")
    download_missing(wheels, wanted_for_tests(_build_wheel(wheels)), python)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    if size > MAX_BYTES:
        largest = sorted(((file.stat().st_size, file.name) for file in wheels.iterdir()), reverse=True)[:5]
        raise BundleError(f"{out} has {size / 1e6:.0f} MB, more than {MAX_BYTES / 1e6:.0f}; the largest wheels: {largest}")
    print(f"{out}: {size / 1e6:.0f} MB, {len(list(wheels.iterdir()))} wheels for Python {python}; next: bash {out}/run.sh")


def files_with_gpu_tests() -> list[str]:
    """Return the test files with tests marked `gpu`, relative to the repository."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    listed = _run([sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider"], environment)
    return sorted({line.partition("::")[0] for line in listed.splitlines() if "::" in line and line.startswith("tests/")})


def _build_wheel(folder: Path) -> Path:
    """Build our wheel from a copy, since setuptools leaves files in the sources."""
    sources = folder.parent / "sources"
    _copy(REPOSITORY / "lightning_dlrover", sources / "lightning_dlrover")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copyfile(REPOSITORY / name, sources / name)
    command = [sys.executable, "-m", "uv", "build", "--quiet", "--offline", "--no-build-isolation", "--python", sys.executable]
    _run([*command, "--wheel", "--out-dir", str(folder), str(sources)], {**os.environ, "PYTHONPATH": ""})
    shutil.rmtree(sources)
    (folder / ".gitignore").unlink(missing_ok=True)
    [wheel] = folder.iterdir()
    return wheel


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.pyc", ".hypothesis"))
    else:
        shutil.copyfile(source, target)


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BundleError(f"`{' '.join(command)}` ended with {done.returncode}: {(done.stderr or done.stdout)[-1500:]}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, metavar="X.Y", help="Python of the machine with the GPU")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build" / "gpu-bundle", help="folder (default: %(default)s)")
    options = parser.parse_args()
    try:
        build(options.out.resolve(), options.python)
    except BundleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
