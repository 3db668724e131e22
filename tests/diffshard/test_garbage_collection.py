"""Collections are rarer inside a block, as they were after it, and blocks may overlap."""

import contextlib
import gc
import threading

import pytest

from diffshard.garbage_collection import rare_collections


@pytest.fixture(autouse=True)
def thresholds():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_collections_are_rarer_inside_a_block_and_as_before_after_it():
    with rare_collections():
        assert all(inside > before for inside, before in zip(gc.get_threshold(), (700, 10, 10), strict=True))
        assert gc.isenabled()
    assert gc.get_threshold() == (700, 10, 10)
    with contextlib.suppress(KeyError), rare_collections():
        raise KeyError
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("thresholds_before", [(0, 10, 10), (10**6, 1000, 1000)], ids=["switched off", "rarer already"])
def test_a_block_makes_nothing_more_frequent(thresholds_before):
    gc.set_threshold(*thresholds_before)
    with rare_collections():
        assert gc.get_threshold()[0] == thresholds_before[0]
        assert all(inside >= own for inside, own in zip(gc.get_threshold(), thresholds_before, strict=True))
    assert gc.get_threshold() == thresholds_before


def test_the_last_of_overlapping_blocks_restores_what_was_before_the_first():
    is_inside, may_end = threading.Event(), threading.Event()

    def block():
        with rare_collections():
            is_inside.set()
            may_end.wait()

    thread = threading.Thread(target=block)
    with rare_collections():
        thread.start()
        is_inside.wait()
    assert gc.get_threshold() != (700, 10, 10)
    may_end.set()
    thread.join()
    assert gc.get_threshold() == (700, 10, 10)


def test_circles_are_still_freed_inside_a_block():
    freed = []

    class Circle:
        def __init__(self):
            self.own = self

        def __del__(self):
            freed.append(1)

    with rare_collections():
        for _ in range(200_000):
            Circle()
    assert len(freed) > 0
