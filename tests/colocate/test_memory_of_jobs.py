from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from lightning_dlrover.colocate.tenants import (
    Action,
    Admit,
    Charge,
    End,
    Holding,
    Pause,
    Phase,
    Resume,
    Shrink,
    Sizes,
    Start,
    Tenant,
    after,
    free_bytes,
    memory_actions,
)

GIB = 1 << 30


HOST: Sizes = {"host": 4 * GIB}
BOTH: Sizes = {"host": 4 * GIB, "gpu": 4 * GIB}


def holding(charge: float = 1.0, resident: float = 0.5, need: float = 0.0, is_short: bool = False) -> Holding:
    """A part of a memory; sizes in GiB."""
    return Holding(int(charge * GIB), int(resident * GIB), int(need * GIB), is_short)


def tenant(
    name: str,
    phase: Phase = "running",
    charge: float = 1.0,
    resident: float = 0.5,
    need: float = 0.0,
    is_short: bool = False,
    gpu: Holding | None = None,
    **fields: object,
) -> Tenant:
    """A job; sizes in GiB, of the host's memory."""
    holdings = {"host": holding(charge, resident, need, is_short), **({"gpu": gpu} if gpu is not None else {})}
    made = Tenant(name, name, phase, "cpu", 0, 0.0, 0.0, holdings)  # type: ignore[arg-type]
    return replace(made, **fields)  # type: ignore[arg-type]


def carried_out(tenants: list[Tenant], actions: list[Action]) -> list[Tenant]:
    by_name = {tenant.name: tenant for tenant in tenants}
    for action in actions:
        assert not isinstance(action, Start)
        by_name[action.job] = after(by_name[action.job], action)
        if isinstance(action, End):
            del by_name[action.job]
    return [*by_name.values()]


def test_job_that_fits_is_admitted_with_its_need() -> None:
    assert memory_actions(HOST, [tenant("a", "asks", need=2)]) == [Admit("a", {"host": 2 * GIB})]


def test_job_that_does_not_fit_next_to_others_waits() -> None:
    assert memory_actions(HOST, [tenant("a", charge=3), tenant("b", "asks", charge=0.5, need=2)]) == []


def test_job_larger_than_the_device_fails_with_both_sizes() -> None:
    (action,) = memory_actions(HOST, [tenant("a", "asks", need=5)])
    assert isinstance(action, End)
    assert action.result == "failed"
    assert "needs 5,120 MiB of memory, and the device has 4,096 MiB" in action.reason


def test_job_that_outgrows_its_charge_gets_more_if_there_is_room() -> None:
    assert memory_actions(HOST, [tenant("a", charge=1, resident=2), tenant("b")]) == [Charge("a", "host", int(2.5 * GIB))]


def test_job_that_outgrows_its_charge_is_paused_without_room() -> None:
    actions = memory_actions(HOST, [tenant("liar", charge=1, resident=1.5), tenant("b", charge=2.2)])
    assert [type(action) for action in actions] == [Pause]
    assert actions[0].job == "liar"


def test_elastic_job_that_outgrows_its_charge_gives_up_a_process_before_it_is_paused() -> None:
    elastic = tenant("liar", charge=1, resident=1.5, num_processes=3, min_processes=1)
    other = tenant("b", charge=2.2)
    (action,) = memory_actions(HOST, [elastic, other])
    assert isinstance(action, Shrink)
    assert action.num_processes == 2
    assert memory_actions(HOST, [replace(elastic, is_shrinking=True), other]) == []
    at_its_least = replace(elastic, num_processes=1)
    assert [type(action) for action in memory_actions(HOST, [at_its_least, other])] == [Pause]


def test_elastic_job_that_endangers_others_goes_back_at_once() -> None:
    elastic = tenant("liar", charge=1, resident=1.95, num_processes=3, min_processes=1)
    (action,) = memory_actions(HOST, [elastic, tenant("b", charge=2)])
    assert isinstance(action, End)


def test_job_that_endangers_others_goes_back_to_the_queue() -> None:
    (action,) = memory_actions(HOST, [tenant("liar", charge=1, resident=1.95), tenant("b", charge=2)])
    assert isinstance(action, End)
    assert (action.job, action.result) == ("liar", "evicted")


def test_paused_job_resumes_once_there_is_room() -> None:
    paused = tenant("liar", "paused", charge=1.5, resident=1.5, is_short=True)
    assert memory_actions(HOST, [paused]) == [Charge("liar", "host", int(1.875 * GIB)), Resume("liar")]


def test_large_paused_job_resumes_once_it_is_alone() -> None:
    paused = tenant("liar", "paused", charge=3.8, resident=3.8, is_short=True)
    assert memory_actions(HOST, [paused]) == [Charge("liar", "host", 4 * GIB), Resume("liar")]


def test_jobs_that_wait_for_each_other_are_untangled() -> None:
    asks = [tenant(name, "asks", charge=1.5, resident=1.5, need=3, started_s=at) for name, at in (("old", 0.0), ("young", 1.0))]
    (action,) = memory_actions(HOST, asks)
    assert isinstance(action, End)
    assert (action.job, action.result) == ("young", "evicted")


# --- on a GPU -----------------------------------------------------------------------------------------------------------------


def test_job_on_a_gpu_is_admitted_only_where_both_memories_have_room() -> None:
    asks = tenant("a", "asks", need=1, gpu=holding(0.5, 0.5, need=3))
    assert memory_actions(BOTH, [asks]) == [Admit("a", {"host": GIB, "gpu": 3 * GIB})]
    assert memory_actions(BOTH, [asks, tenant("b", charge=3.5, gpu=holding(0.1, 0.1))]) == []
    assert memory_actions(BOTH, [asks, tenant("b", gpu=holding(2.0, 0.1))]) == []


def test_job_of_unknown_peak_gets_all_of_the_gpu_that_is_free() -> None:
    asks = tenant("a", "asks", need=1, gpu=replace(holding(0.5, 0.5, need=0.6), is_guess=True))
    other = tenant("b", gpu=holding(1.0, 0.1))
    assert memory_actions(BOTH, [asks, other]) == [Admit("a", {"host": GIB, "gpu": 3 * GIB})]
    assert memory_actions(BOTH, [asks, tenant("b", gpu=holding(3.45, 0.1))]) == []


def test_job_that_is_too_large_for_the_gpu_fails_with_both_sizes() -> None:
    (action,) = memory_actions(BOTH, [tenant("a", "asks", need=1, gpu=holding(0.5, 0.5, need=5))])
    assert isinstance(action, End)
    assert "needs 5,120 MiB of GPU memory, and the device has 4,096 MiB" in action.reason


def test_job_that_outgrows_its_part_of_the_gpu_is_paused_until_both_memories_have_room() -> None:
    liar, other = tenant("liar", gpu=holding(1.0, 1.5)), tenant("b", gpu=holding(2.2, 1.0))
    (paused,) = memory_actions(BOTH, [liar, other])
    assert isinstance(paused, Pause)
    assert (paused.job, paused.memory) == ("liar", "gpu")
    assert "1,536 MiB of the GPU's memory, 1,024 MiB were expected" in paused.reason
    waits = after(liar, paused)
    assert memory_actions(BOTH, [waits, other]) == []
    short_of_both = replace(waits, holdings={**waits.holdings, "host": holding(1.0, 1.0, is_short=True)})
    assert memory_actions(BOTH, [short_of_both, tenant("b", charge=2.9, resident=2.9, gpu=holding(0.1, 0.1))]) == []
    actions = memory_actions(BOTH, [short_of_both, tenant("b", gpu=holding(0.1, 0.1))])
    assert [type(action) for action in actions] == [Charge, Charge, Resume]
    assert not carried_out([short_of_both], actions)[0].paused_for_memory


def test_jobs_that_hold_what_the_other_needs_of_another_memory_are_untangled() -> None:
    first = tenant("first", "asks", 3.0, 3.0, need=3, gpu=holding(0.5, 0.5, need=3), started_s=0.0)
    second = tenant("second", "asks", 0.5, 0.5, need=2, gpu=holding(3.0, 3.0, need=3), started_s=1.0)
    (action,) = memory_actions(BOTH, [first, second])
    assert isinstance(action, End)
    assert (action.job, action.result) == ("second", "evicted")
    assert "it needs 2,048 MiB and 3,072 MiB of the GPU's memory" in action.reason


sizes = st.floats(0.05, 3.9)
parts = st.tuples(sizes, sizes, sizes, st.booleans())


@given(
    st.lists(
        st.tuples(st.sampled_from(["starting", "asks", "running", "paused", "ending"]), parts, parts, st.integers(0, 3)),
        min_size=1,
        max_size=6,
    ),
    st.booleans(),
)
def test_charges_never_exceed_the_device_and_some_job_can_continue(
    drawn: list[tuple[Phase, tuple[float, float, float, bool], tuple[float, float, float, bool], int]], on_gpu: bool
) -> None:
    memories: Sizes = BOTH if on_gpu else HOST
    tenants = []
    for number, (phase, host, gpu, priority) in enumerate(drawn):
        of_host, of_gpu = (holding(*each[:3], is_short=phase == "paused" and each[3]) for each in (host, gpu))
        made = tenant(f"j{number}", phase, gpu=of_gpu if on_gpu else None, priority=priority, started_s=float(number))
        tenants.append(replace(made, holdings={**made.holdings, "host": of_host}))
    fitted_before = {memory: free_bytes(memory, size, tenants) >= 0 for memory, size in memories.items()}
    for _ in range(2 * len(memories) * len(tenants) + 2):
        actions = memory_actions(memories, tenants)
        if not actions:
            break
        tenants = carried_out(tenants, actions)
    else:
        raise AssertionError("the actions never come to an end")
    for memory, size in memories.items():
        assert not fitted_before[memory] or free_bytes(memory, size, tenants) >= 0
    waits = [t for t in tenants if t.phase == "asks" or t.paused_for_memory]
    assert not tenants or len(waits) < len(tenants), "all jobs wait for memory"
