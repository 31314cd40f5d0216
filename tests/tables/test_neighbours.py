"""The choice of the workers that keep copies of a part of a snapshot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dlrover.tables.snapshots import others

layouts = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12)


@given(hosts=layouts, count=st.integers(0, 2))
def test_copies_are_on_the_requested_number_of_workers_other_hosts_first(hosts: list[str], count: int) -> None:
    for rank in range(len(hosts)):
        kept_by = others(rank, hosts, count)
        assert len(kept_by) == len(set(kept_by)) == min(count, len(hosts) - 1)
        assert rank not in kept_by
        elsewhere = len(set(hosts) - {hosts[rank]})
        assert len({hosts[r] for r in kept_by} - {hosts[rank]}) == min(count, elsewhere)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("num_hosts, per_host", [(1, 4), (2, 1), (2, 2), (2, 8), (3, 1), (3, 2), (4, 8)])
def test_copies_are_balanced_over_equal_hosts(num_hosts: int, per_host: int, count: int) -> None:
    hosts = [str(rank // per_host) for rank in range(num_hosts * per_host)]
    kept = [r for rank in range(len(hosts)) for r in others(rank, hosts, count)]
    assert {kept.count(r) for r in range(len(hosts))} == {min(count, len(hosts) - 1)}


def test_on_one_host_the_next_ones_round_the_ring_keep_the_copies() -> None:
    assert [others(rank, ["a"] * 3, 2) for rank in range(3)] == [[1, 2], [2, 0], [0, 1]]


def test_leaving_workers_keep_copies_only_where_no_others_are_left() -> None:
    hosts = ["a", "b", "c"]
    assert [others(rank, hosts, 1, {2}) for rank in range(3)] == [[1], [0], [0]]
    assert others(0, hosts, 2, {1}) == [2, 1]
    assert others(0, ["a", "a", "b"], 1, {2}) == [1]  # on its own host, which stays
    assert [others(rank, hosts, 1, {0, 1, 2}) for rank in range(3)] == [others(rank, hosts, 1) for rank in range(3)]
