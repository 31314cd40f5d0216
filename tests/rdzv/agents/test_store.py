from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_dlrover.rdzv.agents.store import MAX_VALUE_BYTES, EtcdStore
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from lightning_dlrover.rdzv.job.records import Keys
from tests.support.waiting import eventually
from tests.support.warm_process import WarmProcess, run_code

MakeStore = Callable[[], Any]
RunAll = Callable[..., list[str]]


@pytest.fixture(params=["tcp", "etcd", "etcd below a PrefixStore"])
def store(request: pytest.FixtureRequest, client: EtcdClient, keys: Keys) -> Iterator[Any]:
    """TCPStore passes the same tests, because it defines the contract."""
    if request.param == "tcp":
        on_tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))  # type: ignore[attr-defined]
        on_tcp.set_timeout(timedelta(seconds=0.3))
        yield on_tcp
        return
    on_etcd = EtcdStore(client, keys.store + "1/", timedelta(seconds=0.3))
    yield on_etcd if request.param == "etcd" else dist.PrefixStore("prefix", on_etcd)  # type: ignore[attr-defined]
    on_etcd.close()


plain = pytest.mark.parametrize("store", ["tcp", "etcd"], indirect=True)
"""For calls that torch's PrefixStore does not forward to a store written in Python."""


def test_value_set_is_returned(store: Any) -> None:
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
def test_wait_that_times_out_raises_torchs_error(store: Any, ask: Callable[[Any], object]) -> None:
    with pytest.raises(dist.DistStoreError, match=r"timeout after .*\n?.*missing"):
        ask(store)


def test_add_counts_and_get_reads_the_count_as_text(store: Any) -> None:
    assert [store.add("n", i) for i in (3, 0, -1)] == [3, 3, 2]
    assert store.get("n") == b"2"


def test_no_addition_is_lost_or_made_twice_among_many(store: Any) -> None:
    with ThreadPoolExecutor(4) as pool:
        sums = list(pool.map(lambda _: store.add("n", 1), range(40)))
    assert sorted(sums) == list(range(1, 41))


def test_compare_set_changes_only_the_expected_value(store: Any) -> None:
    assert store.compare_set("k", "expected", "new") == b"expected"  # the key is missing although a value was expected
    assert not store.check(["k"])
    assert store.compare_set("k", "", "first") == b"first"
    assert store.compare_set("k", "wrong", "second") == b"first"
    assert store.compare_set("k", "first", "second") == b"second"


def test_check_is_true_once_all_keys_exist(store: Any) -> None:
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


def test_prefix_store_sets_the_timeout_of_the_store_below(client: EtcdClient, keys: Keys) -> None:
    store = EtcdStore(client, keys.store + "1/", timedelta(seconds=30))
    above = dist.PrefixStore("prefix", store)  # type: ignore[attr-defined]
    above.set_timeout(timedelta(seconds=0.2))
    for wait in (lambda: above.get("k"), lambda: above.wait(["k"]), lambda: above.multi_get(["k"])):
        with pytest.raises(dist.DistStoreError, match=r"0\.2 s"):
            wait()
    store.close()


ALL_BYTES = bytes(range(256))


@pytest.mark.parametrize("key", ["", "a/b/../c", " spaces and\nlines ", "ключ", "x" * 2000, "nul\0inside", b"bytes"])
def test_any_key_holds_any_value(store: Any, key: str | bytes) -> None:
    store.set(key, ALL_BYTES)
    assert store.check([key])
    assert store.get(key) == ALL_BYTES
    assert store.compare_set(key, ALL_BYTES, b"\0") == b"\0"
    assert store.delete_key(key)
    assert not store.check([key])


@plain
def test_keys_that_differ_only_by_escaping_are_different(store: Any) -> None:
    names = [ALL_BYTES, b"\xff", "\x02ff", b"\0\x02ff", "\0", "\0\1", "\x03", b"\0\x03", "a", "a/", "a/b"]
    for index, name in enumerate(names):
        store.set(name, str(index))
    assert [store.get(name) for name in names] == [str(index).encode() for index in range(len(names))]


def test_empty_lists_of_keys_are_present_at_once(store: Any) -> None:
    assert store.check([])
    store.wait([])
    assert store.multi_get([]) == []
    store.multi_set([], [])


@pytest.mark.parametrize("wrong", [1, None, 2.5])
def test_value_that_is_neither_text_nor_bytes_is_refused(store: Any, wrong: object) -> None:
    with pytest.raises(TypeError):
        store.set("k", wrong)
    with pytest.raises(TypeError):
        store.set(wrong, "v")
    assert not store.check(["k"])


def test_keys_and_values_that_do_not_pair_are_refused(store: Any) -> None:
    with pytest.raises(dist.DistStoreError):
        store.multi_set(["a", "b"], ["1"])


def test_counters_go_below_zero_and_beyond_32_bits_and_start_from_text(store: Any) -> None:
    assert store.add("n", -7) == -7
    assert store.add("n", 1 << 62) == (1 << 62) - 7
    store.set("m", "41")
    assert store.add("m", 1) == 42


def test_a_timeout_of_nothing_is_over_at_once(store: Any) -> None:
    store.set_timeout(timedelta(seconds=60))
    began = time.monotonic()
    with pytest.raises(dist.DistStoreError):
        store.wait(["missing"], timedelta(0))
    assert time.monotonic() - began < 20


def test_a_wait_for_several_keys_ends_with_the_last_of_them(store: Any) -> None:
    store.set_timeout(timedelta(seconds=30))
    store.set("first", "1")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.clone().wait, ["first", "second", "elsewhere"])
        store.set("second", "2")
        assert not waiting.done()
        store.set("elsewhere", "3")
        waiting.result(30)


def test_a_key_longer_than_the_awaited_one_does_not_end_the_wait(store: Any) -> None:
    store.set("rank10", "longer")
    with pytest.raises(dist.DistStoreError):
        store.wait(["rank1"], timedelta(seconds=0.2))


def test_of_many_that_compare_and_set_one_succeeds(store: Any) -> None:
    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(lambda i: store.compare_set("leader", "", str(i)), range(8)))
    assert len(set(seen)) == 1
    assert store.get("leader") == seen[0]


def test_nothing_appended_by_many_is_lost(store: Any) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: store.append("log", f"{i:02d}"), range(20)))
    log = store.get("log").decode()
    assert sorted(log[i : i + 2] for i in range(0, 40, 2)) == [f"{i:02d}" for i in range(20)]


def test_a_barrier_holds_until_all_have_come(store: Any) -> None:
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(store.clone().barrier, "meet", 2, timedelta(seconds=30))
        assert not early.done()
        store.barrier("meet", 2, timedelta(seconds=30))
        early.result(30)


@plain
def test_queue_returns_values_in_order(store: Any) -> None:
    for i in range(5):
        store.queue_push("q", str(i))
    assert store.queue_len("q") == 5
    assert store.queue_len("another") == 0
    assert store.check(["q"])
    store.wait(["q"])
    assert store.num_keys() == 0  # only values are counted
    assert [store.queue_pop("q") for _ in range(5)] == [str(i).encode() for i in range(5)]
    assert not store.check(["q"])


@plain
def test_an_empty_queue_is_waited_for_or_refused_as_asked(store: Any) -> None:
    with pytest.raises(dist.QueueEmptyError):
        store.queue_pop("q", block=False)
    with pytest.raises(dist.DistStoreError, match="timeout after"):
        store.queue_pop("q")
    store.set_timeout(timedelta(seconds=30))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.clone().queue_pop, "q")
        store.queue_push("q", b"\xff")
        assert waiting.result(30) == b"\xff"


@plain
def test_concurrent_pops_return_each_value_once(store: Any) -> None:
    for i in range(20):
        store.queue_push("q", str(i))
    with ThreadPoolExecutor(4) as pool:
        popped = list(pool.map(lambda _: int(store.queue_pop("q")), range(20)))
    assert sorted(popped) == list(range(20))


# -- behaviour of the store on etcd alone


def test_adding_to_text_is_refused(client: EtcdClient, keys: Keys) -> None:
    store = EtcdStore(client, keys.store)
    store.set("k", "text")
    with pytest.raises(dist.DistStoreError, match=r"'.*/key/k' holds b'text', not a number"):
        store.add("k", 1)
    assert store.get("k") == b"text"


def test_a_value_does_not_grow_beyond_the_limit_by_appending(client: EtcdClient, keys: Keys) -> None:
    store = EtcdStore(client, keys.store)
    store.set("log", b"x" * (MAX_VALUE_BYTES - 1))
    store.append("log", "y")
    with pytest.raises(ValueError, match=f"'log' has {MAX_VALUE_BYTES + 1} bytes"):
        store.append("log", "z")
    assert len(store.get("log")) == MAX_VALUE_BYTES


def test_a_megabyte_travels_through_cpp_and_more_is_refused_there_too(client: EtcdClient, keys: Keys) -> None:
    store = dist.PrefixStore("p", EtcdStore(client, keys.store))  # type: ignore[attr-defined]
    store.set("large", b"\xfe" * MAX_VALUE_BYTES)  # type: ignore[arg-type]
    assert store.get("large") == b"\xfe" * MAX_VALUE_BYTES
    with pytest.raises(ValueError, match="a store on etcd accepts at most"):
        store.set("larger", b"\xfe" * (MAX_VALUE_BYTES + 1))  # type: ignore[arg-type]


def test_reading_many_keys_takes_few_requests(client: EtcdClient, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    store = EtcdStore(client, keys.store)
    names = [f"rank{i}" for i in range(300)]
    store.multi_set(names, names)
    asked: list[str] = []
    call = client.caller.call
    monkeypatch.setattr(
        client.caller,
        "call",
        lambda action, *args, **kwargs: (asked.append(action), call(action, *args, **kwargs))[1],  # type: ignore[func-returns-value]
    )
    assert store.multi_get(names) == [name.encode() for name in names]
    assert store.check(names)
    assert len(asked) <= 6


def test_keys_of_stores_do_not_pile_up_with_writes_and_clones(client: EtcdClient, keys: Keys) -> None:
    store = EtcdStore(client, keys.store)
    for i in range(30):
        store.clone().add("n", 1)
        store.queue_push("q", str(i))
        store.queue_pop("q")
    assert len(client.get_prefix(keys.store)[1]) == 2  # the counter, and the marker of the newest write


def test_wait_continues_after_a_restart_of_etcd(private_etcd: EmbeddedEtcd) -> None:
    with EtcdClient(EtcdConfig(private_etcd.endpoint, timeout_s=20.0)) as client:
        store = EtcdStore(client, "/s/", timedelta(seconds=60))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.get, "later")
            eventually(lambda: any("etcd-mirror" in t.name for t in threading.enumerate()), "the wait has begun", 20)
            private_etcd.kill()
            private_etcd.restart()
            store.set("later", "now")
            assert waiting.result(60) == b"now"


def test_a_wait_ends_with_the_name_of_an_etcd_that_stays_away(private_etcd: EmbeddedEtcd) -> None:
    with EtcdClient(EtcdConfig(private_etcd.endpoint, timeout_s=0.5)) as client:
        store = EtcdStore(client, "/s/", timedelta(seconds=3))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.get, "later")
            eventually(lambda: any("etcd-mirror" in t.name for t in threading.enumerate()), "the wait has begun", 20)
            private_etcd.kill()
            with pytest.raises(dist.DistNetworkError, match=private_etcd.endpoint):
                waiting.result(30)


IN_PROCESS = """
import sys
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from lightning_dlrover.rdzv.agents.store import EtcdStore
endpoint, prefix, argument = sys.argv[1:]
client = EtcdClient(EtcdConfig(endpoint))
"""


@pytest.fixture
def run_all(fork_server: None, etcd: EmbeddedEtcd, keys: Keys, tmp_path: Path) -> RunAll:
    """Run processes of one source side by side, each with an argument of its own; return the last line of each output."""

    def run(source: str, *arguments: str) -> list[str]:
        outputs = [tmp_path / f"{argument}.out" for argument in arguments]
        processes = [
            WarmProcess(run_code, [IN_PROCESS + source, etcd.endpoint, keys.store, argument], os.environ, output)
            for argument, output in zip(arguments, outputs, strict=True)
        ]
        try:
            codes = [process.wait(90) for process in processes]
        finally:
            for process in processes:
                process.kill()
        texts = [output.read_text() for output in outputs]
        assert not any(codes), f"{codes}: {texts}"
        return [text.splitlines()[-1] if text else "" for text in texts]

    return run


ADDING_PROCESS = """
store = EtcdStore(client, prefix)
for _ in range(50):
    store.add("n", 1)
    store.append("log", argument)
"""


def test_processes_do_not_lose_each_others_writes(run_all: RunAll, client: EtcdClient, keys: Keys) -> None:
    run_all(ADDING_PROCESS, *"abc")
    store = EtcdStore(client, keys.store)
    assert store.get("n") == b"150"
    assert sorted(store.get("log").decode()) == ["a"] * 50 + ["b"] * 50 + ["c"] * 50


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
    only_cpp_knows_it = dist.PrefixStore("p", EtcdStore(client, keys.store))  # type: ignore[attr-defined]
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
import torch, torch.distributed as dist
rank = int(argument)
store = dist.PrefixStore("group", EtcdStore(client, prefix))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
second = dist.new_group([0, 1])
dist.all_reduce(total, group=second)
dist.barrier()
print(total.item())
dist.destroy_process_group()
"""


def test_gloo_forms_process_groups_over_it(run_all: RunAll) -> None:
    assert run_all(GLOO_WORKER, "0", "1") == ["6.0", "6.0"]


SUBGROUP_WORKER = """
from datetime import timedelta
import torch, torch.distributed as dist
rank = int(argument)
store = EtcdStore(client, prefix)
chain = dist.PrefixStore("outer", dist.PrefixStore("inner", store))
dist.init_process_group("gloo", store=chain, rank=rank, world_size=3, timeout=timedelta(seconds=60))
pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
sums = []
for members, group in zip(([0, 1], [1, 2]), pairs):
    if rank in members:
        total = torch.tensor([10.0 ** rank])
        dist.all_reduce(total, group=group)
        sums.append(int(total.item()))
dist.monitored_barrier(timeout=timedelta(seconds=60))
if rank < 2:
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=1))  # which rank 2 never enters
    except RuntimeError as error:
        sums.append("refused")
chain.add("ended", 1)
chain.wait(["ended"])
print(sums)
"""


def test_subgroups_and_barriers_work_as_over_any_store(run_all: RunAll) -> None:
    assert run_all(SUBGROUP_WORKER, "0", "1", "2") == ["[11, 'refused']", "[11, 110, 'refused']", "[110]"]


INTERRUPTED = """
import threading, os, signal
from datetime import timedelta
store = EtcdStore(client, prefix, timedelta(seconds=100))
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's shell has it ignored
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    store.get("never")
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_a_wait_is_ended_by_ctrl_c(run_all: RunAll) -> None:
    assert run_all(INTERRUPTED, "") == ["interrupted"]
