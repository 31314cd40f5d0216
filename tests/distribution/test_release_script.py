"""The release script, in a repository of the test's own with this checkout's files."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import release
import yaml
from packaging.utils import canonicalize_name

from tests.support.checkouts import REPOSITORY, copy_checkout, git
from tests.support.distributions import Distributions, build
from tests.support.environments import required_distributions
from tests.support.waiting import eventually

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

ENTRY = "## 9.0.0 (unreleased)\nA release for tests.\n\n### Training\n- Something new.\n\n"
DATED = ENTRY.replace("unreleased", "2026-01-31")
EMPTY = "## 9.0.0 (unreleased)\n\n### Training\n\n"
TODAY = datetime.date(2030, 1, 31)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A commit of this checkout's files, with an entry for 9.0.0 in the changelog."""
    folder = copy_checkout(tmp_path / "repository")
    changelog = folder / "CHANGELOG.md"
    introduction, newest, older = changelog.read_text().partition("\n## ")
    changelog.write_text(f"{introduction}\n{ENTRY}{newest.lstrip()}{older}")
    git(folder, "init", "--quiet", "--initial-branch", "main")
    git(folder, "config", "user.name", "A Maintainer")
    git(folder, "config", "user.email", "maintainer@example.org")
    commit(folder, "Everything so far")
    return folder


def commit(repository: Path, subject: str) -> None:
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", subject)


def state(repository: Path) -> tuple[object, ...]:
    """The state that a release changes or might leave behind."""
    tags, status = git(repository, "tag", "--list"), git(repository, "status", "--porcelain", "--ignored")
    files = {path: path.read_bytes() for path in map(repository.joinpath, ("CHANGELOG.md", "lightning_dlrover/_version.py"))}
    return git(repository, "rev-parse", "HEAD", "--abbrev-ref", "HEAD"), tags, status, files


def run(repository: Path, *arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    temporary = repository.parent / "tmp"
    temporary.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, ".ci/release.py", *arguments],
        cwd=repository,
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert list(temporary.glob("release-*")) == []
    return done


# --- refused ---


def change_a_file(repository: Path) -> None:
    (repository / "README.md").write_text("changed")


def add_a_file(repository: Path) -> None:
    (repository / "notes.txt").write_text("new")


def leave_the_branch(repository: Path) -> None:
    git(repository, "checkout", "--quiet", "--detach")


def tag(name: str) -> Callable[[Path], None]:
    return lambda repository: (git(repository, "tag", name), None)[1]


def entry(text: str) -> Callable[[Path], None]:
    def write(repository: Path) -> None:
        changelog = repository / "CHANGELOG.md"
        changelog.write_text(changelog.read_text().replace(ENTRY, text))
        commit(repository, "Another entry")

    return write


def nothing(repository: Path) -> None:
    pass


@pytest.mark.parametrize(
    "make_unfit, version, reason",
    [
        pytest.param(change_a_file, "9.0.0", "the tree has changes; commit or remove them first:\n M README.md", id="changed"),
        pytest.param(add_a_file, "9.0.0", "?? notes.txt", id="new-file"),
        pytest.param(leave_the_branch, "9.0.0", "HEAD is on no branch", id="detached"),
        pytest.param(tag("v9.0.0"), "9.0.0", "9.0.0 has been released: there is the tag v9.0.0", id="released"),
        pytest.param(tag("v10.0.0"), "9.0.0", "9.0.0 is below 10.0.0, which has been released", id="older"),
        pytest.param(entry(""), "9.0.0", "has no entry '## 9.0.0 (unreleased)'", id="no-entry"),
        pytest.param(nothing, "9.0.0rc1", "has no entry '## 9.0.0rc1 (unreleased)'", id="no-entry-of-candidate"),
        pytest.param(nothing, "9.0", "has no entry '## 9.0 (unreleased)'", id="no-entry-of-prefix"),
        pytest.param(entry(DATED), "9.0.0", "is '## 9.0.0 (2026-01-31)', not", id="dated-entry"),
        pytest.param(entry(EMPTY), "9.0.0", "for 9.0.0 is empty", id="empty-entry"),
        pytest.param(nothing, "new", "'new' is no version", id="no-version"),
        pytest.param(nothing, "v9.0.0", "'v9.0.0' is not how an index writes a version; write 9.0.0", id="letter"),
        pytest.param(nothing, "9.0.0+local", "write 9.0.0", id="local"),
    ],
)
def test_unfit_repository_is_refused(repository: Path, make_unfit: Callable[[Path], None], version: str, reason: str) -> None:
    make_unfit(repository)
    before = state(repository)
    done = run(repository, version)
    assert (done.returncode, done.stderr.startswith("refused: ")) == (2, True), done.stderr
    assert reason in done.stderr
    assert state(repository) == before


# --- failures ---


def break_the_build(repository: Path) -> None:
    project = repository / "pyproject.toml"
    project.write_text(project.read_text().replace('license = "Apache-2.0"', "license = 2"))


def forget_the_tests(repository: Path) -> None:
    manifest = repository / "MANIFEST.in"
    manifest.write_text(manifest.read_text().replace("graft docs\n", ""))


@pytest.mark.parametrize("plant, reason", [(break_the_build, "`uv` ended with 2"), (forget_the_tests, "`pytest` ended with 1")])
def test_failing_step_leaves_the_repository_as_it_was(repository: Path, plant: Callable[[Path], None], reason: str) -> None:
    plant(repository)
    commit(repository, "Break it")
    before = state(repository)
    done = run(repository, "9.0.0", "--offline")
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"failed, and the repository is as before: {reason}" in done.stderr
    assert state(repository) == before


def test_interrupted_checks_leave_the_repository_as_it_was(repository: Path, tmp_path: Path) -> None:
    before = state(repository)
    output, temporary = tmp_path / "output", tmp_path / "tmp"
    temporary.mkdir()
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, ".ci/release.py", "9.0.0", "--offline"],
            cwd=repository,
            env={**os.environ, "TMPDIR": str(temporary)},
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    try:
        eventually(lambda: "$ pytest" in output.read_text(), "the begin of the checks", 60)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM, output.read_text()
    finally:
        process.kill()
        process.wait()
    assert list(temporary.glob("release-*")) == []
    assert state(repository) == before


@pytest.fixture
def built(tmp_path: Path) -> Path:
    folder = tmp_path / "built"
    folder.mkdir()
    (folder / "a.whl").write_text("a wheel")
    return folder


def record(repository: Path, built: Path) -> None:
    files = release.changed_files(repository, "9.0.0", TODAY)
    release.record(repository, "9.0.0", files, git(repository, "rev-parse", "HEAD").strip(), built)


@pytest.mark.parametrize(
    "hook, condition", [("pre-commit", "true"), ("reference-transaction", "grep -q refs/tags")], ids=["commit", "tag"]
)
def test_commit_or_tag_that_fails_is_taken_back(repository: Path, built: Path, hook: str, condition: str) -> None:
    script = repository / ".git" / "hooks" / hook
    script.parent.mkdir(exist_ok=True)
    script.write_text(f"#!/bin/sh\nif {condition}; then echo not allowed >&2; exit 1; fi\n")
    script.chmod(0o755)
    before = state(repository)
    with pytest.raises(release.FailedError, match="not allowed"):
        record(repository, built)
    assert state(repository) == before


def test_commit_made_during_the_checks_is_not_released(repository: Path, built: Path) -> None:
    checked = git(repository, "rev-parse", "HEAD").strip()
    files = release.changed_files(repository, "9.0.0", TODAY)
    add_a_file(repository)
    commit(repository, "Something else")
    before = state(repository)
    with pytest.raises(release.RefusedError, match="HEAD has moved"):
        release.record(repository, "9.0.0", files, checked, built)
    assert state(repository) == before


def test_distributions_built_before_are_not_overwritten(repository: Path, built: Path) -> None:
    (repository / "dist").mkdir()
    (repository / "dist" / "a.whl").write_text("another wheel")
    before = state(repository)
    with pytest.raises(release.RefusedError, match="would be overwritten"):
        record(repository, built)
    assert state(repository) == before
    assert (repository / "dist" / "a.whl").read_text() == "another wheel"


# --- releases ---


@pytest.mark.long
@pytest.mark.timeout(400)
def test_release_is_built_checked_committed_and_tagged(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Beside this test, test_wheel.py runs them with the same files.
    costly = ("test_job_outside_of_the_repository_runs_to_its_end", "test_every_module_is_imported_with_the_requirements_alone")
    monkeypatch.setenv("PYTEST_ADDOPTS", " ".join(f"--deselect {release.CHECKS}/test_wheel.py::{name}" for name in costly))
    start = git(repository, "rev-parse", "HEAD").strip()
    done = run(repository, "9.0.0", "--offline", timeout_s=350)
    assert done.returncode == 0, done.stdout + done.stderr

    assert git(repository, "log", "--format=%s %an", f"{start}..").splitlines() == ["Release 9.0.0 A Maintainer"]
    assert git(repository, "diff", "--name-only", start).split() == ["CHANGELOG.md", "lightning_dlrover/_version.py"]
    assert git(repository, "status", "--porcelain") == ""
    assert git(repository, "cat-file", "-t", "v9.0.0").strip() == "tag"
    assert git(repository, "rev-parse", "v9.0.0^{commit}", "HEAD").split()[0] == git(repository, "rev-parse", "main").strip()
    date = f"{datetime.date.today():%Y-%m-%d}"
    assert ENTRY.replace("unreleased", date) in (repository / "CHANGELOG.md").read_text()

    released = Distributions(repository / "dist")
    bill = released.folder / "lightning_dlrover-9.0.0.cdx.json"
    assert sorted(released.folder.iterdir()) == sorted([released.wheel, released.sdist, bill])
    assert json.loads(bill.read_text())["metadata"]["component"]["version"] == "9.0.0"
    assert "$ twine check --strict" in done.stdout
    assert str(released.metadata.version) == "9.0.0"
    for step in (
        "git push --atomic REMOTE main v9.0.0",
        f"uv publish dist/{released.wheel.name} dist/{released.sdist.name}\n",
        f"reset --keep {start[:12]}",
    ):
        assert step in done.stdout

    again = run(repository, "9.0.0")
    assert (again.returncode, "9.0.0 has been released" in again.stderr) == (2, True)


def test_bill_of_materials_lists_the_files_and_all_requirements(tmp_path: Path) -> None:
    built = build(copy_checkout(tmp_path / "checkout"), tmp_path / "dist")
    bill = release.bill_of_materials(built.folder, "9.0.0", 1_700_000_000)
    assert (bill["bomFormat"], bill["specVersion"], bill["metadata"]["timestamp"]) == (
        "CycloneDX",
        "1.6",
        "2023-11-14T22:13:20Z",
    )
    main = bill["metadata"]["component"]
    assert main["purl"] == "pkg:pypi/lightning-dlrover@9.0.0"
    hashes = {each["name"]: each["hashes"][0]["content"] for each in main["components"]}
    assert hashes == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (built.wheel, built.sdist)}
    required = {canonicalize_name(name) for name in required_distributions(built.requirements)}
    assert {canonicalize_name(each["name"]) for each in bill["components"]} == required
    refs = [main["purl"], *(each["bom-ref"] for each in bill["components"])]
    assert len({*refs}) == len(refs)
    assert sorted(each["ref"] for each in bill["dependencies"]) == sorted(refs)
    assert {ref for each in bill["dependencies"] for ref in each["dependsOn"]} == {*refs} - {main["purl"]}
    assert bill == release.bill_of_materials(built.folder, "9.0.0", 1_700_000_000)


def test_workflow_that_publishes_is_the_only_one_with_a_token_and_runs_what_exists() -> None:
    text = (REPOSITORY / ".github" / "workflows" / "release.yml").read_text()
    workflow = yaml.safe_load(text)
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as a boolean
    assert workflow["permissions"] == {"contents": "read"}
    assert {name for name, job in workflow["jobs"].items() if "permissions" in job} == {"publish"}
    assert workflow["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert workflow["jobs"]["publish"]["needs"] == "build"
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v1|[0-9a-f]{40})", use) for use in re.findall(r"uses: (\S+)", text))
    assert "secrets." not in text
    named = re.findall(r"(?<!\S)(?:\.ci|tests)/[\w/.]+", text)
    assert {".ci/release.py", "tests/distribution/test_wheel.py"} <= {*named}
    assert [name for name in named if not (REPOSITORY / name).exists()] == []
    assert [
        target for target in re.findall(r"run: make (\w+)", text) if f"\n{target}:" not in (REPOSITORY / "Makefile").read_text()
    ] == []


CFF = {"cff-version", "message", "title", "type", "abstract", "authors", "license", "keywords", "references"}
"""Fields of the Citation File Format 1.2.0 that are in use; its own checker accepts the file."""


def test_citation_has_the_fields_of_its_format_and_names_the_project() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert {"cff-version", "message", "title", "authors"} <= citation.keys() <= CFF
    assert (citation["cff-version"], citation["title"], citation["license"]) == ("1.2.0", project["name"], project["license"])
    assert citation["authors"] == project["authors"]
    assert all({"type", "title", "authors"} <= each.keys() for each in citation["references"])


@pytest.mark.on_demand
@pytest.mark.timeout(1800)
def test_dry_run_with_all_checks_changes_nothing(repository: Path) -> None:
    before = state(repository)
    done = run(repository, "9.0.0", "--dry-run", timeout_s=3500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "9.0.0 can be released" in done.stdout
    assert state(repository) == before
