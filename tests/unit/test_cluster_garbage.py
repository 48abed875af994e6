"""The driver collects garbage less often during a run, and as before afterwards."""

import gc

from roll_like.cluster.driver_loop import GC_THRESHOLDS, rare_garbage_collection


def test_thresholds_are_those_of_before_afterwards() -> None:
    before = gc.get_threshold()
    assert before != GC_THRESHOLDS
    with rare_garbage_collection():
        assert gc.get_threshold() == GC_THRESHOLDS
    assert gc.get_threshold() == before
