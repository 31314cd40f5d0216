"""Contents of a view when records cannot be read."""

from __future__ import annotations

from lightning_dlrover.codec import RecordError
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.job.records import DrainRecord, Keys, RoundRecord, encode
from lightning_dlrover.rdzv.membership.rounds import Decoder, JobView


def test_garbage_keeps_the_last_readable_version_in_force(client: EtcdClient, keys: Keys) -> None:
    good = encode(RoundRecord(4, ["a"], "because", "grow", planned=True))
    client.put(keys.round, good)
    client.put(keys.drains + "a", encode(DrainRecord("a", "because")))
    reported: list[str] = []

    def bad(key: str, error: RecordError) -> None:
        reported.append(key)

    decoder = Decoder(keys, bad)

    def view() -> JobView:
        return decoder.view({e.key: e for e in client.get_prefix(keys.live)[1]})

    assert view().round is not None
    client.put(keys.round, b"garbage")
    client.put(keys.drains + "b", b"garbage")
    for _ in range(3):
        seen = view()
        assert seen.round is not None
        assert seen.round.number == 4
        assert seen.drains == {"a"}
    assert sorted(reported) == sorted([keys.round, keys.drains + "b"])
