"""The pool of threads behind the CPU kernels: every unit of a call runs once, whatever the threads do."""

import ctypes
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from ratoon.layers import native
from ratoon.layers.native_ops import set_native_threads

pytestmark = pytest.mark.skipif(
    native.library() is None, reason="no kernels for this processor; `make setup` builds them"
)

UNIT_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)


@pytest.fixture(autouse=True)
def usual_threads():
    yield
    set_native_threads(2)


def run_units(count, body=lambda unit: None):
    """How often each unit ran."""
    seen = []

    def run(context, unit):
        body(unit)
        seen.append(unit)

    (path,) = Path(native.__file__).parent.glob(f"kernels_{native.kernel_set_name()}.*")
    ctypes.CDLL(str(path)).parallel_units(UNIT_BODY(run), None, ctypes.c_int64(count))
    return Counter(seen)


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 17])
def test_every_unit_runs_once(threads):
    set_native_threads(threads)
    for count in (0, 1, 2, 3, 7, 16, 17, 100):
        assert run_units(count) == Counter(range(count))


def test_a_slow_unit_does_not_hold_up_the_others_of_its_thread():
    """The first unit waits until all others have run: those of the same share must be taken by another thread."""
    set_native_threads(2)
    others = threading.Semaphore(0)

    def body(unit):
        if unit > 0:
            others.release()
        else:
            for _ in range(15):
                assert others.acquire(timeout=120)

    assert run_units(16, body) == Counter(range(16))


def test_threads_that_fell_asleep_join_again():
    set_native_threads(4)
    run_units(8)
    time.sleep(0.02)
    assert run_units(8) == Counter(range(8))


def test_callers_take_turns():
    set_native_threads(3)
    results: list[Counter[int]] = []
    callers = [threading.Thread(target=lambda: results.extend(run_units(20) for _ in range(20))) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert results == [Counter(range(20))] * 60
