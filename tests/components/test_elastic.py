"""The components as TorchX finds and lints them: by file path, and by the names that the package registers."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torchx.runner import Runner, get_runner

from lightning_dlrover import __version__
from lightning_dlrover.cli.options import TIMEOUTS
from lightning_dlrover.cli.parser import build_parser
from lightning_dlrover.components import ESCAPED, elastic
from lightning_dlrover.components.targets.local import node_app
from lightning_dlrover.components.targets.target import NodeSpec
from lightning_dlrover.rdzv.agents.rendezvous import HandlerConfig, export
from lightning_dlrover.rdzv.group.config import WorldConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

REPOSITORY = Path(__file__).parents[2]
COMPONENT = Path(elastic.__file__)


def torchx(*arguments: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchx.cli.main", *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False)


def asks_the_cluster(runner: Runner) -> bool:
    """Return whether this release validates each job with Kubernetes by default, even for a dry run."""
    return runner.scheduler_run_opts("kubernetes").get("validate_spec") is not None


def dryrun(runner: Runner, component: str, scheduler: str, *arguments: str, **config: Any) -> str:
    """Text of the request that would be submitted."""
    return str(runner.dryrun_component(f"{COMPONENT}:{component}", [*arguments], scheduler, config, workspace=None))


def test_a_job_on_this_machine_is_one_process_that_starts_its_nodes(tmp_path: Path) -> None:
    options = ["--script", "train.py", "--workers", "1:4", "--options=--objective cheapest --preemption-notice 5"]
    done = torchx("run", "--dryrun", "-s", "local_cwd", f"{COMPONENT}:train", *options, "--", "--epochs", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    request = done.stdout.partition("SCHEDULER REQUEST")[2]
    words = ["lightning_dlrover.cli", "run", "--target=auto", "--workers=1:4", "--rdzv-id=train-"]
    words += ["--objective", "cheapest", "--preemption-notice", "5", "train.py", "--epochs", "3"]
    places = [request.find(f"'{word}") for word in words]
    assert -1 not in places, request
    assert places == sorted(places)
    assert "--endpoint" not in request  # omitted options are not passed on


def test_torchx_names_an_option_that_is_missing(tmp_path: Path) -> None:
    done = torchx("run", "--dryrun", "-s", "local_cwd", f"{COMPONENT}:node", "--script", "train.py", cwd=tmp_path)
    assert done.returncode != 0
    assert "rdzv_endpoint" in done.stderr + done.stdout


def test_a_job_on_slurm_is_one_small_slurm_job_called_as_its_number() -> None:
    with get_runner() as runner:
        given = [
            "--script",
            "train.py",
            "--partition",
            "gpu",
            "--account",
            "me",
            "--time",
            "2:00:00",
            "--cpu",
            "8",
            "--gpu",
            "1",
        ]
        script = dryrun(runner, "train", "slurm", *given, "--", "a b", "$HOME", partition="login")
    assert "--partition=login" in script
    assert "--cpus-per-task=1" in script
    assert "--gpus" not in script.partition("srun")[0]
    assert '--rdzv-id="$SLURM_JOB_ID"' in script
    for word in ("--partition=gpu", "--account=me", "--time=2:00:00", "--cpus=8", "train.py a%20b %24HOME"):
        assert word in script.partition("srun")[2], word


def test_job_on_kubernetes_is_one_pod_that_may_start_others() -> None:
    given = ["--script", "/work/train.py", "--image", "trainer:1", "--cpu", "4", "--memMB", "8192", "--namespace", "training"]
    given += ["--service_account", "trainer", "--node_selector", "pool=gpu,zone=a", "--env", "LEVEL=1,LIST=a,b"]
    given += ["--mounts", "type=volume,src=runs,dst=/runs,type=volume,src=data,dst=/data,readonly", "--run_dir", "/runs"]
    with get_runner() as runner:
        config: dict[str, Any] = {"queue": "q", "service_account": "dlrover-controller"}
        config |= {"validate_spec": False} if asks_the_cluster(runner) else {}
        manifest = yaml.safe_load(dryrun(runner, "train", "kubernetes", *given, **config))
    [task] = manifest["spec"]["tasks"]
    pod = task["template"]["spec"]
    [container] = pod["containers"]
    assert (task["replicas"], pod["serviceAccountName"], container["image"]) == (1, "dlrover-controller", "trainer:1")
    assert "minAvailable" not in task  # one replica, so there is no smaller minimum
    assert container["command"][0] == "python"  # the image's own Python
    assert container["command"][-1] == "/work/train.py"
    name = manifest["metadata"]["name"]
    assert container["command"][3:5] == ["run", ESCAPED]
    build_parser().parse_args(["run", *map(unquote, container["command"][5:])])  # `dlrover run` accepts each option
    resources = "--image=trainer:1 --cpus=4 --mem=8192M --namespace=training --service-account=trainer --run-dir=/runs"
    repeated = (
        "--node-selector=pool=gpu --node-selector=zone=a --env=LEVEL=1 --env=LIST=a,b --mount=runs:/runs --mount=data:/data:ro"
    )
    assert {f"--rdzv-id={name}", *resources.split(), *repeated.split()} <= {*container["command"]}
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    assert claims == ["runs", "data"]


def test_a_mount_that_nodes_cannot_be_given_is_refused() -> None:
    with pytest.raises(ValueError, match=r"/data.*only type=volume"):
        elastic.train(script="train.py", mounts=["type=bind", "src=/data", "dst=/data"])


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """Environment in which this package's entry points look installed, whatever the present one contains."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    folder = tmp_path / "site" / f"lightning_dlrover-{__version__}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {__version__}\n")
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    lines = [line for group, points in groups.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in points.items()))]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    paths = [str(folder.parent), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


LISTING = """
import json
import torchx.specs as specs
from torchx.specs.finder import ModuleComponentsFinder, get_components
import inspect
arguments = [None] if "validators" in inspect.signature(ModuleComponentsFinder.find).parameters else []
builtins = ModuleComponentsFinder("torchx.components", "").find(*arguments)
print(json.dumps({
    "components": sorted(get_components()),
    "builtins": sorted(component.name for component in builtins if not component.validation_errors),
    "sizes": {name: vars(specs.resource(h=name))["memMB"] for name in ("dlrover_cpu_small", "dlrover_cpu_large", "gpu.small")},
}))
"""


def test_components_and_resources_are_found_by_name_beside_torchxs_own(installed: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LISTING], env=installed, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout)
    assert {"dist.ddp", "utils.echo"} <= {*listed["builtins"]}
    assert listed["components"] == sorted([*listed["builtins"], "dlrover.node", "dlrover.train"])
    assert listed["sizes"]["dlrover_cpu_small"] < listed["sizes"]["dlrover_cpu_large"]
    assert listed["sizes"]["gpu.small"] > 0

    named = ("dlrover.train", "--script", "train.py", "-h", "dlrover_gpu_1")
    done = torchx("run", "--dryrun", "-s", "local_cwd", *named, cwd=tmp_path, env=installed)
    assert done.returncode == 0, done.stderr
    assert all(f"'{word}'" in done.stdout for word in ("--cpus=8", "--gpus=1", "--mem=32768M"))


def test_the_commands_on_the_page_about_torchx_work_as_written(installed: dict[str, str], tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "start" / "torchx.md").read_text()
    found = re.findall(r"^torchx run ((?:.*\\\n)*.*)$|`torchx run (-s [^`]*)`", page, re.MULTILINE)
    commands = [shlex.split((block or inline).replace("\\\n", " ")) for block, inline in found]
    assert {words[1] for words in commands if words[0] == "-s"} >= {"local_cwd", "slurm", "kubernetes"}
    with get_runner() as runner:
        unasked = ",validate_spec=False" if asks_the_cluster(runner) else ""
    for words in commands:
        words = [f"{word}{unasked}" if word.startswith("queue=") else word for word in words]
        done = torchx("run", "--dryrun", *words, cwd=tmp_path, env=installed)
        assert done.returncode == 0, f"{words}: {done.stderr}"

    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith(("| `--", "| `-h"))]
    named = set(re.findall(r"--([a-zA-Z_]+)", " ".join(rows).partition("--options=")[0])) | {"options", "h"}
    assert named == {*inspect.signature(elastic.train).parameters} - {"script_args"}


def test_timeouts_of_a_job_reach_its_agents() -> None:
    options = build_parser().parse_args(
        ["run", "--join-timeout", "2h", "--lease-ttl", "7s", "--wait-timeout", "1d", "train.py"]
    )
    timeouts = {name: getattr(options, name) for name in TIMEOUTS}
    assert timeouts == {"join_timeout": 7200.0, "wait_timeout": 86400.0, "lease_ttl": 7.0}
    spec = NodeSpec("train.py", (), "h:1", "run", "/dlrover", 1, 2, timeouts=timeouts)
    [conf] = [a.partition("=")[2] for a in node_app(spec, "node1", "$").roles[0].args if a.startswith("--rdzv-conf=")]
    assert conf == "live=1,key_prefix=/dlrover,join_timeout=7200,wait_timeout=86400,lease_ttl=7"
    parameters = RendezvousParameters("etcd-v3", "h:1", "run", 1, 2, **dict(pair.split("=") for pair in conf.split(",")))
    config = HandlerConfig.from_parameters(parameters)
    assert (config.join_timeout_s, config.timeouts.wait_timeout_s, config.timeouts.lease_ttl_s) == (7200.0, 86400.0, 7.0)


def test_sizes_of_a_job_reach_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = NodeSpec("train.py", (), "h:1", "run", "/dlrover", 1, 8, sizes=(1, 2, 8))
    [conf] = [a.partition("=")[2] for a in node_app(spec, "node1", "$").roles[0].args if a.startswith("--rdzv-conf=")]
    assert conf == "live=1,sizes=1+2+8,key_prefix=/dlrover"
    parameters = RendezvousParameters("etcd-v3", "h:1", "run", 1, 8, **dict(pair.split("=") for pair in conf.split(",")))
    monkeypatch.setattr(os, "environ", {"HOME": "/"})
    export(HandlerConfig.from_parameters(parameters), "agent", None)
    config = WorldConfig.from_environment(os.environ, "1")
    assert config is not None
    assert (config.sizes, config.max_workers) == ((1, 2, 8), 8)


def test_malformed_sizes_are_refused_by_the_agent() -> None:
    parameters = RendezvousParameters("etcd-v3", "h:1", "run", 1, 8, sizes="1:8")
    with pytest.raises(ValueError, match="--rdzv-conf sizes='1:8' cannot be used: '1:8' is not a number of workers"):
        HandlerConfig.from_parameters(parameters)


@pytest.mark.parametrize("timeouts", ["join_timeout", "join_timeout=1h", "a=1,,b=2", "live=0=1"])
def test_malformed_timeouts_are_refused(timeouts: str) -> None:
    with pytest.raises(ValueError, match="such as join_timeout=3600,lease_ttl=10"):
        elastic.node(script="s.py", rdzv_endpoint="h:1", rdzv_id="run", timeouts=timeouts)
