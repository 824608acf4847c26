from __future__ import annotations

import pytest

from protocol.errors import QueueRefused
from protocol.keys import Keys, epoch_of_consumer, trainer_consumer
from protocol.streams import Stream


def test_every_key_of_a_run_lies_in_one_cluster_slot_and_is_its_own() -> None:
    keys = Keys("demo-1")
    properties = [name for name, value in vars(Keys).items() if isinstance(value, property) and name != "prefix"]
    named = [getattr(keys, name) for name in properties]
    named += [keys.stream(stream) for stream in Stream]
    named += [keys.lease("w0"), keys.lease("w1")]
    assert len(set(named)) == len(named) >= 10
    assert all(name.startswith("arl:{demo-1}:") for name in named)  # the slot is that of what stands in the braces


@pytest.mark.parametrize("run_id", ["", "a b", "a{b}", "a:b", "x" * 129, "é"])
def test_a_run_id_that_cannot_stand_in_keys_is_refused(run_id: str) -> None:
    with pytest.raises(QueueRefused, match="run_id="):
        Keys(run_id)


def test_a_trainers_consumer_name_carries_its_epoch() -> None:
    assert trainer_consumer(12) == "trainer-12"
    assert epoch_of_consumer("trainer-12") == 12
    assert epoch_of_consumer("trainer-12x") is None
    assert epoch_of_consumer("rollout-0") is None
