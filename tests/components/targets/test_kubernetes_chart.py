"""The Helm chart of examples/kubernetes, rendered by Helm, and the manifests, which are one rendering of it."""

from __future__ import annotations

import itertools
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from lightning_dlrover.cli.main import main
from tests.support.helm import (
    ALL,
    CHART,
    EXAMPLES,
    MANIFESTS,
    PACKAGE,
    HelmError,
    find_helm,
    manifest,
    objects,
    render,
    run_helm,
)
from tests.support.kubernetes_models import problems, restricted_violations


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = find_helm(tmp_path_factory.mktemp("helm"))
    if found is None:
        message = f"Helm is neither in PATH nor in the package {PACKAGE} (`make setup` installs it)"
        if os.environ.get("CI"):
            raise HelmError(message)
        pytest.skip(message)
    return found


VALUES: list[tuple[str, ...]] = [
    (),
    ALL,
    ("etcd.enabled=false", "endpoint=etcd.example:2379", *ALL),
    ("rbac.create=false", "secret.create=false", "secret.name=mine", "user=trainer", *ALL),
    ("etcd.storageClass=fast", "etcd.extraArgs={--quota-backend-bytes=8589934592,--auto-compaction-retention=1h}", *ALL),
    ("networkPolicies.jobs={a,b-2}", "brain.extraArgs={--max-wait=2h}", "brain.resources=null", *ALL),
]


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifest_is_the_chart_rendered(helm: Path, name: str) -> None:
    rendered = manifest(helm, name)
    assert (EXAMPLES / name).read_text() == rendered, "run `python -m tests.support.helm` after a change of the chart"
    assert objects(rendered)


@pytest.mark.parametrize("values", VALUES, ids=str)
def test_chart_renders_objects_that_kubernetes_takes(helm: Path, values: tuple[str, ...]) -> None:
    rendered = objects(render(helm, values))
    assert [problem for each in rendered for problem in problems(each)] == []
    names = [(each["kind"], each["metadata"]["name"]) for each in rendered]
    assert len(set(names)) == len(names)
    pods = [each["spec"]["template"]["spec"] for each in rendered if "template" in each.get("spec", {})]
    assert [wrong for pod in pods for wrong in restricted_violations(pod)] == []
    for each in rendered:
        if each["kind"] in ("StatefulSet", "Deployment"):
            labels = each["spec"]["template"]["metadata"]["labels"]
            assert each["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_chart_holds_what_was_asked_for_and_nothing_else(helm: Path) -> None:
    def kinds(*values: str) -> list[str]:
        return sorted(each["kind"] for each in objects(render(helm, values)))

    assert kinds() == ["Role", "RoleBinding", "Secret", "Service", "ServiceAccount", "StatefulSet"]
    assert kinds("rbac.create=false", "secret.create=false") == ["Service", "StatefulSet"]
    alone = kinds("etcd.enabled=false", "endpoint=e:1", "rbac.create=false", "brain.enabled=true", "secret.create=false")
    assert alone == ["Deployment"]


def test_releases_of_one_namespace_have_no_name_in_common(helm: Path) -> None:
    named = [
        {each["metadata"]["name"] for each in objects(render(helm, ("brain.enabled=true",), release))} for release in ("a", "b")
    ]
    assert all(named)
    assert not named[0] & named[1]


def brain(helm: Path, *values: str) -> dict[str, Any]:
    [found] = [each for each in objects(render(helm, (*ALL, *values))) if each["kind"] == "Deployment"]
    pod = found["spec"]["template"]["spec"]
    assert isinstance(pod, dict)
    return pod


def test_command_of_the_brain_is_one_that_dlrover_has(helm: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    [container] = brain(helm, "user=trainer")["containers"]
    command: list[str] = [*container["command"], *container["args"]]
    program, *words = command
    assert program == "dlrover"
    password = tmp_path / "password"
    password.write_text("secret\n")
    unreachable = [word.replace("dlrover-etcd:2379", "127.0.0.1:1") for word in words]
    arguments = [word.replace("/etc/dlrover/etcd/password", str(password)) for word in unreachable]
    assert main(arguments) == 2, shlex.join(arguments)
    assert "127.0.0.1:1" in capsys.readouterr().err  # every option was understood
    assert "--password-file=/etc/dlrover/etcd/password" in words


def test_brain_uses_the_etcd_and_the_secret_that_it_is_given(helm: Path) -> None:
    pod = brain(helm, "etcd.enabled=false", "endpoint=etcd.example:2379", "secret.name=mine")
    assert "--endpoint=etcd.example:2379" in pod["containers"][0]["args"]
    assert pod["volumes"] == [{"name": "etcd-access", "secret": {"secretName": "mine"}}]


@pytest.mark.parametrize("password", ["123", "yes", 'a: "b" #c', "\\'"])
def test_any_password_stays_what_it_is(helm: Path, tmp_path: Path, password: str) -> None:
    file = tmp_path / "password"
    file.write_text(password)
    text = run_helm(helm, "template", "dlrover", CHART, "--set-file", f"secret.password={file}")
    [secret] = [each for each in objects(text) if each["kind"] == "Secret"]
    assert secret["stringData"] == {"password": password}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("etcd.enbled=false", "enbled"),
        ("brain.replicas=0", "replicas"),
        ("brain.policy=fifo", "policy"),
        ("etcd.storage=much", "storage"),
        ("networkPolicies.jobs={My.Job}", "jobs"),
        ("endpoint=http://etcd", "endpoint"),
    ],
)
def test_wrong_value_is_refused_by_its_name(helm: Path, value: str, message: str) -> None:
    with pytest.raises(HelmError, match=message):
        render(helm, (value,))


def test_missing_endpoint_is_asked_for(helm: Path) -> None:
    with pytest.raises(HelmError, match="HOST:PORT of an etcd"):
        render(helm, ("etcd.enabled=false", "brain.enabled=true"))


def test_chart_passes_the_strict_check_of_helm(helm: Path) -> None:
    for values in itertools.islice(VALUES, 2):
        run_helm(helm, "lint", "--strict", CHART, *(word for value in values for word in ("--set", value)))
