"""A worker that arrives while others search for a learning rate trains with them afterwards."""

from __future__ import annotations

from tests.e2e.arguments_job import BATCH_SIZE, NUM_ROWS, Arguments, search_and_train
from tests.e2e.forked_jobs import MakeJob

EPOCHS = 3
NUM_STEPS = EPOCHS * (NUM_ROWS // BATCH_SIZE)


def test_worker_that_comes_during_the_search_joins_the_fit_after_it(make_job: MakeJob) -> None:
    job = make_job(Arguments("tuner", epochs=EPOCHS, search_step_s=0.1), script=search_and_train)
    first = job.start()
    job.wait_until(lambda: first.records("searched"), "the search to begin")
    joiner = job.start()
    job.wait_until(lambda: joiner.records("waits"), "the joiner to stand by")
    assert not first.records("found")  # it still searches
    job.wait_for_world(2)
    assert job.finish() == [0, 0], job.report()

    # The search has finished nothing: every step of the real `fit` was made, the last of them by both.
    done = {(record["epoch"], record["batch"]) for record in job.records("done")}
    assert sorted(done) == [(epoch, batch) for epoch in range(EPOCHS) for batch in range(NUM_STEPS // EPOCHS)]
    assert [record["step"] for record in job.records("after_fit")] == [NUM_STEPS, NUM_STEPS]
    assert joiner.records("done")[-1]["world"] == 2
    # The joiner made no step before it was admitted, and none of the search.
    assert first.records("done")[0]["at"] < joiner.records("done")[0]["at"]
    assert not joiner.records("searched")
    (found,) = {record["lr"] for record in job.records("found")}
    assert {str(record["lr"]) for record in job.records("done")} == {str([found])}
