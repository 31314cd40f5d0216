from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torchrun_agent import eventually

from lightning_dlrover.rdzv.client import EtcdClient, EtcdConfig
from lightning_dlrover.rdzv.records import Keys
from lightning_dlrover.rdzv.server import EmbeddedEtcd
from lightning_dlrover.rdzv.store import MAX_VALUE_BYTES, EtcdStore

MakeStore = Callable[[], Any]


@pytest.fixture(params=["tcp", "etcd", "etcd below a PrefixStore"])
def store(request: pytest.FixtureRequest, client: EtcdClient, keys: Keys) -> Iterator[Any]:
    """TCPStore passes the same tests: it says what the contract is."""
    timeout = timedelta(seconds=0.3)
    if request.param == "tcp":
        yield dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout)
        return
    on_etcd = EtcdStore(client, keys.store + "1/", timeout)
    yield on_etcd if request.param == "etcd" else dist.PrefixStore("prefix", on_etcd)
    on_etcd.close()


def test_what_was_set_is_got(store: Any) -> None:
    for value in ("text", b"\x00\xff", b"", "x" * 100_000):
        store.set("k", value)
        assert store.get("k") == (value.encode() if isinstance(value, str) else value)


def test_get_waits_for_another_thread_to_set(store: Any) -> None:
    store.set_timeout(timedelta(seconds=10))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.clone().get, "later")
        store.set("later", "now")
        assert waiting.result(10) == b"now"


@pytest.mark.parametrize(
    "ask",
    [
        lambda s: s.get("missing"),
        lambda s: s.multi_get(["missing"]),
        lambda s: s.wait(["missing"]),
        lambda s: s.wait(["missing"], timedelta(seconds=0.1)),
    ],
)
def test_waiting_in_vain_raises_what_torch_expects(store: Any, ask: Callable[[Any], object]) -> None:
    with pytest.raises(dist.DistStoreError, match=r"timeout after .*\n?.*missing"):
        ask(store)


def test_add_counts_and_get_reads_the_count_as_text(store: Any) -> None:
    assert [store.add("n", i) for i in (3, 0, -1)] == [3, 3, 2]
    assert store.get("n") == b"2"


def test_no_addition_is_lost_or_made_twice_among_many(store: Any) -> None:
    with ThreadPoolExecutor(4) as pool:
        sums = list(pool.map(lambda _: store.add("n", 1), range(40)))
    assert sorted(sums) == list(range(1, 41))


def test_compare_set_changes_only_what_was_expected(store: Any) -> None:
    assert store.compare_set("k", "expected", "new") == b"expected"  # missing, and something was expected
    assert not store.check(["k"])
    assert store.compare_set("k", "", "first") == b"first"
    assert store.compare_set("k", "wrong", "second") == b"first"
    assert store.compare_set("k", "first", "second") == b"second"


def test_check_knows_whether_all_keys_are_there(store: Any) -> None:
    store.set("a", "")
    assert store.check(["a"])
    assert not store.check(["a", "b"])


def test_append_extends_and_several_keys_are_set_and_got_in_order(store: Any) -> None:
    store.append("log", "a")
    store.append("log", "b")
    assert store.get("log") == b"ab"
    names = [f"k{i}" for i in range(150)]
    store.multi_set(names, [str(i) for i in range(150)])
    assert store.multi_get(names[::-1]) == [str(i).encode() for i in range(150)][::-1]


def test_a_deleted_key_is_gone(store: Any) -> None:
    store.set("a", "1")
    store.set("b", "1")
    before = store.num_keys()
    assert store.delete_key("a")
    assert not store.delete_key("a")
    assert store.num_keys() == before - 1
    assert not store.check(["a"])


def test_the_timeout_can_be_changed_and_read(store: Any) -> None:
    store.set_timeout(timedelta(seconds=7))
    assert store.timeout == timedelta(seconds=7)


# -- what only the store on etcd does


def test_a_timeout_names_run_key_and_seconds(client: EtcdClient, keys: Keys) -> None:
    store = EtcdStore(client, keys.store + "4/", timedelta(seconds=0.1))
    with pytest.raises(dist.DistStoreError, match=rf"0\.1 s.*{keys.run_id}/store/4/key/absent"):
        store.get("absent")


def test_a_value_that_etcd_would_refuse_is_refused_by_name_and_size(client: EtcdClient, keys: Keys) -> None:
    store = EtcdStore(client, keys.store)
    store.set("fits", b"x" * MAX_VALUE_BYTES)
    with pytest.raises(ValueError, match=rf"'large' has {MAX_VALUE_BYTES + 1} bytes"):
        store.set("large", b"x" * (MAX_VALUE_BYTES + 1))


def test_two_prefixes_do_not_see_each_other(client: EtcdClient, keys: Keys) -> None:
    one, ten = EtcdStore(client, keys.store + "1/"), EtcdStore(client, keys.store + "10/")
    one.set("k", "1")
    assert not ten.check(["k"])
    client.delete_prefix(keys.store + "10/")
    assert one.check(["k"])


def test_an_unreachable_etcd_is_a_network_error() -> None:
    with (
        EtcdClient(EtcdConfig("127.0.0.1:1", timeout_s=0.2)) as client,
        pytest.raises(dist.DistNetworkError, match=r"127\.0\.0\.1:1"),
    ):
        EtcdStore(client, "/s/").set("k", "v")


def test_the_store_lives_as_long_as_cpp_uses_it(client: EtcdClient, keys: Keys) -> None:
    only_cpp_knows_it = dist.PrefixStore("p", EtcdStore(client, keys.store))
    gc.collect()
    only_cpp_knows_it.set("k", "v")
    assert only_cpp_knows_it.get("k") == b"v"


def test_waiting_leaves_no_thread_behind(client: EtcdClient, keys: Keys) -> None:
    store = EtcdStore(client, keys.store, timedelta(seconds=0.1))
    before = threading.active_count()
    for _ in range(3):
        with pytest.raises(dist.DistStoreError):
            store.get("absent")
    eventually(lambda: threading.active_count() <= before, "the threads have ended", 5)


GLOO_WORKER = """
import sys
import torch, torch.distributed as dist
from lightning_dlrover.rdzv.client import EtcdClient, EtcdConfig
from lightning_dlrover.rdzv.store import EtcdStore
endpoint, prefix, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = dist.PrefixStore("group", EtcdStore(EtcdClient(EtcdConfig(endpoint)), prefix))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
second = dist.new_group([0, 1])
dist.all_reduce(total, group=second)
dist.barrier()
print(total.item())
dist.destroy_process_group()
"""


def test_gloo_forms_process_groups_over_it(etcd: EmbeddedEtcd, keys: Keys) -> None:
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", GLOO_WORKER, etcd.endpoint, keys.store, str(global_rank)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for global_rank in range(2)
    ]
    assert [worker.communicate(timeout=60)[0].strip() for worker in workers] == ["6.0", "6.0"]
    assert [worker.returncode for worker in workers] == [0, 0]
