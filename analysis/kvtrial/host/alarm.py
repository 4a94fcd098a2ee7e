"""A timer for an event loop that is exact to microseconds: uvloop's own count whole milliseconds.

Linux: a timerfd on CLOCK_MONOTONIC, which is what time.perf_counter reads there. Python has it from 3.13 on, the C
library long before.
"""

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1
_TFD_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval_s", ctypes.c_long), ("interval_ns", ctypes.c_long),
                ("value_s", ctypes.c_long), ("value_ns", ctypes.c_long))  # fmt: skip


class Alarm:
    """Calls `callback` in the loop once the moment of the last `set` has come. `close` it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        loop.add_reader(self._descriptor, self._fired)

    def set(self, at_ns: int) -> None:
        """Fire at `at_ns` (time.perf_counter_ns), at once where that is past; an earlier setting is forgotten."""
        when = _Itimerspec(0, 0, *divmod(max(1, at_ns), 1_000_000_000))
        if self._libc.timerfd_settime(self._descriptor, _TFD_TIMER_ABSTIME, ctypes.byref(when), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def close(self) -> None:
        """Never fire again. Idempotent."""
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _fired(self) -> None:
        # Nothing to read: it was set anew since.
        with contextlib.suppress(BlockingIOError):
            os.read(self._descriptor, 8)
            self._callback()
