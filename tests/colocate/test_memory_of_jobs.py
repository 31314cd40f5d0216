from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from lightning_dlrover.colocate.memory import free_bytes, memory_actions
from lightning_dlrover.colocate.tenants import Action, Admit, Charge, End, Pause, Phase, Resume, Shrink, Tenant

GIB = 1 << 30


def tenant(
    name: str, phase: Phase = "running", charge: float = 1.0, resident: float = 0.5, need: float = 0.0, **fields: object
) -> Tenant:
    """A job; sizes in GiB."""
    made = Tenant(name, name, phase, "cpu", 0, 0.0, 0.0, int(charge * GIB), int(resident * GIB), int(need * GIB))
    return replace(made, **fields)  # type: ignore[arg-type]


def after(tenants: list[Tenant], actions: list[Action]) -> list[Tenant]:
    """Carry the actions out."""
    by_name = {tenant.name: tenant for tenant in tenants}
    for action in actions:
        now = by_name[action.job]
        if isinstance(action, Admit):
            by_name[action.job] = replace(now, phase="running", charge_bytes=action.charge_bytes)
        elif isinstance(action, Charge):
            by_name[action.job] = replace(now, charge_bytes=action.charge_bytes)
        elif isinstance(action, Pause):
            by_name[action.job] = replace(now, phase="paused", paused_for_memory=True)
        elif isinstance(action, Resume):
            by_name[action.job] = replace(now, phase="running", paused_for_memory=False)
        elif isinstance(action, Shrink):
            by_name[action.job] = replace(now, is_shrinking=True)
        elif isinstance(action, End):
            del by_name[action.job]
    return list(by_name.values())


def test_job_that_fits_is_admitted_with_its_need() -> None:
    assert memory_actions(4 * GIB, [tenant("a", "asks", need=2)]) == [Admit("a", 2 * GIB)]


def test_job_that_does_not_fit_beside_others_waits() -> None:
    assert memory_actions(4 * GIB, [tenant("a", charge=3), tenant("b", "asks", charge=0.5, need=2)]) == []


def test_job_larger_than_the_device_fails_in_words() -> None:
    (action,) = memory_actions(4 * GIB, [tenant("a", "asks", need=5)])
    assert isinstance(action, End)
    assert action.result == "failed"
    assert "needs 5,120 MiB of memory, and the device has 4,096 MiB" in action.reason


def test_job_that_outgrows_its_charge_gets_more_if_there_is_room() -> None:
    assert memory_actions(4 * GIB, [tenant("a", charge=1, resident=2), tenant("b")]) == [Charge("a", int(2.5 * GIB))]


def test_job_that_outgrows_its_charge_is_paused_without_room() -> None:
    actions = memory_actions(4 * GIB, [tenant("liar", charge=1, resident=1.5), tenant("b", charge=2.2)])
    assert [type(action) for action in actions] == [Pause]
    assert actions[0].job == "liar"


def test_elastic_job_that_outgrows_its_charge_gives_up_a_process_before_it_is_paused() -> None:
    elastic = tenant("liar", charge=1, resident=1.5, num_processes=3, min_processes=1)
    other = tenant("b", charge=2.2)
    (action,) = memory_actions(4 * GIB, [elastic, other])
    assert isinstance(action, Shrink)
    assert action.num_processes == 2
    assert memory_actions(4 * GIB, [replace(elastic, is_shrinking=True), other]) == []
    at_its_least = replace(elastic, num_processes=1)
    assert [type(action) for action in memory_actions(4 * GIB, [at_its_least, other])] == [Pause]


def test_elastic_job_that_endangers_others_goes_back_at_once() -> None:
    elastic = tenant("liar", charge=1, resident=1.95, num_processes=3, min_processes=1)
    (action,) = memory_actions(4 * GIB, [elastic, tenant("b", charge=2)])
    assert isinstance(action, End)


def test_job_that_endangers_others_goes_back_to_the_queue() -> None:
    (action,) = memory_actions(4 * GIB, [tenant("liar", charge=1, resident=1.95), tenant("b", charge=2)])
    assert isinstance(action, End)
    assert (action.job, action.result) == ("liar", "evicted")


def test_paused_job_goes_on_once_there_is_room() -> None:
    paused = tenant("liar", "paused", charge=1.5, resident=1.5, paused_for_memory=True)
    assert memory_actions(4 * GIB, [paused]) == [Charge("liar", int(1.875 * GIB)), Resume("liar")]


def test_large_paused_job_goes_on_once_it_is_alone() -> None:
    paused = tenant("liar", "paused", charge=3.8, resident=3.8, paused_for_memory=True)
    assert memory_actions(4 * GIB, [paused]) == [Charge("liar", 4 * GIB), Resume("liar")]


def test_jobs_that_wait_for_each_other_are_untangled() -> None:
    asks = [tenant(name, "asks", charge=1.5, resident=1.5, need=3, started_s=at) for name, at in (("old", 0.0), ("young", 1.0))]
    (action,) = memory_actions(4 * GIB, asks)
    assert isinstance(action, End)
    assert (action.job, action.result) == ("young", "evicted")


sizes = st.floats(0.05, 3.9)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["starting", "asks", "running", "paused", "ending"]),
            sizes,
            sizes,
            sizes,
            st.booleans(),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_charges_never_exceed_the_device_and_somebody_can_go_on(
    drawn: list[tuple[Phase, float, float, float, bool, int]],
) -> None:
    memory = 4 * GIB
    tenants = [
        tenant(
            f"j{i}",
            phase,
            charge,
            resident,
            need,
            paused_for_memory=phase == "paused" and pauses,
            priority=priority,
            started_s=float(i),
        )
        for i, (phase, charge, resident, need, pauses, priority) in enumerate(drawn)
    ]
    fitted_before = free_bytes(memory, tenants) >= 0
    for _ in range(2 * len(tenants) + 2):
        actions = memory_actions(memory, tenants)
        if not actions:
            break
        tenants = after(tenants, actions)
    else:
        raise AssertionError("the actions never come to an end")
    if fitted_before:
        assert free_bytes(memory, tenants) >= 0
    waits = [t for t in tenants if t.phase == "asks" or t.paused_for_memory]
    assert not tenants or len(waits) < len(tenants), "all jobs wait for memory"
