"""Nodes with networks of their own, cut off from etcd, from each other, or from both.

A node is a network namespace that a worker enters; a bridge joins them all with the host, where etcd runs.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator

import pytest

from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from tests.e2e.harness import Job, Worker
from tests.e2e.history import History, history_violations
from tests.e2e.plain_loop import PlainSettings, run_plain_loop
from tests.e2e.test_plain_loop import assert_everyone_counted_the_same
from tests.e2e.toy_job import Recorder

CLONE_NEWNET = 0x40000000
NUM_NODES = 3
SETTINGS = PlainSettings(num_steps=1_000_000)  # runs until the test ends it
_NUMBERS = itertools.count()


def ip(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=True)


class Network:
    """A bridge and the nodes on it. The host has address 1, node n has 10 + n."""

    def __init__(self) -> None:
        number = (os.getpid() + 257 * next(_NUMBERS)) % 65536  # several test runs share the machine
        self.name = f"dlr{number:x}"
        self.subnet = f"10.{200 + number // 256 % 50}.{number % 256}"

    def start(self) -> None:
        ip(f"link add {self.name} type bridge")
        ip(f"addr add {self.subnet}.1/24 dev {self.name}")
        ip(f"link set {self.name} up")
        for node in range(NUM_NODES):
            name = self.node(node)
            ip(f"netns add {name}")
            ip(f"link add {name} type veth peer name eth0 netns {name}")
            ip(f"link set {name} master {self.name} up")
            self.inside(node, f"addr add {self.address(node)}/24 dev eth0")
            self.inside(node, "link set lo up")
            self.inside(node, "link set eth0 up")

    def stop(self) -> None:
        for command in (*(f"netns del {self.node(node)}" for node in range(NUM_NODES)), f"link del {self.name}"):
            subprocess.run(["ip", *command.split()], capture_output=True, check=False)

    def node(self, node: int) -> str:
        return f"{self.name}n{node}"

    def address(self, node: int) -> str:
        return f"{self.subnet}.{10 + node}"

    def inside(self, node: int, command: str) -> None:
        ip(f"-n {self.node(node)} {command}")

    def cut_off(self, node: int, what: str) -> None:
        """Cut a node off from `etcd`, from its `peers`, or from `both`."""
        if what == "both":
            ip(f"link set {self.node(node)} down")
            return
        others = [self.address(other) for other in range(NUM_NODES) if other != node]
        for address in [f"{self.subnet}.1"] if what == "etcd" else others:
            self.inside(node, f"route add blackhole {address}/32")

    def heal(self, node: int, what: str) -> None:
        if what == "both":
            ip(f"link set {self.node(node)} up")
            return
        others = [self.address(other) for other in range(NUM_NODES) if other != node]
        for address in [f"{self.subnet}.1"] if what == "etcd" else others:
            self.inside(node, f"route del blackhole {address}/32")


@pytest.fixture
def network() -> Iterator[Network]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the `ip` command (Debian package iproute2)")
    network = Network()
    try:
        network.start()
        yield network
    except subprocess.CalledProcessError as error:
        if "not permitted" not in error.stderr:
            raise AssertionError(error.stderr) from error
        pytest.skip(f"network namespaces are not permitted here: {error.stderr}")
    finally:
        network.stop()


def run_in_namespace(recorder: Recorder, settings: tuple[str, PlainSettings]) -> None:
    """Run the plain loop on a node of its own."""
    with open(f"/run/netns/{settings[0]}", "rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    run_plain_loop(recorder, settings[1])


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", ["etcd", "peers", "both"])
def test_severed_node_is_left_out_and_rejoins_when_it_is_back(
    what: str, network: Network, make_job: Callable[..., Job], run_id: str
) -> None:
    with EmbeddedEtcd(host="0.0.0.0") as etcd:
        endpoint = f"{network.subnet}.1:{etcd.port}"
        job = make_job(None, script=run_in_namespace, endpoint=endpoint, lease_ttl_s=2)
        history = History(endpoint, job.run_id)

        def start(node: int) -> Worker:
            return job.start(settings=(network.node(node), SETTINGS))

        lost = [start(node) for node in range(NUM_NODES)][2]
        job.wait_for_world(3)
        network.cut_off(2, what)
        job.wait_until(lambda: job.workers[0].step > lost.step + 5 or None, "the others to go on")
        rounds = job.round_number
        if what == "peers":  # the worker learns of its removal from etcd
            job.wait_until(lambda: lost.exit_code is not None or None, "the node that was cut off to notice")
        network.heal(2, what)
        assert lost.wait() not in (0, None)
        last_of_three = max(r["step"] for r in job.records("done") if r["world"] == 3)
        assert max(r["step"] for r in lost.records("done")) <= last_of_three
        assert job.round_number == rounds
        start(2)
        job.wait_for_world(3)
        codes = job.end()
        assert [code for worker, code in zip(job.workers, codes, strict=True) if worker is not lost] == [0, 0, 0]
        assert_everyone_counted_the_same(job, job.step)
        assert history_violations(history.finish(), history.keys) == []
        history.close()
