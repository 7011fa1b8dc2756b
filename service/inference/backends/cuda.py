"""CUDA from Python: the probe, which errors are fatal, and memory for a batch.

The only importer of cuda.bindings. Nothing here is imported before `probe` has found a device.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from math import prod
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from service.errors import BackendFault, BackendLost, BackendRecoverable

FATAL = frozenset({214, 220, 226, 700, 702, 709, 710, *range(714, 720), 721, 810, 911, 999})
"""Runtime errors after which every further call of the process fails: cudaErrorIllegalAddress
(700), cudaErrorLaunchTimeout (702), cudaErrorAssert (710), cudaErrorHardwareStackError (714) to
cudaErrorLaunchFailure (719), cudaErrorECCUncorrectable (214), ...; by the CUDA runtime's manual."""
_ALIGN_BYTES = 256
_IN_TEXT = re.compile(r"\bCUDA (?:failure|error):? (\d{1,3})\b", re.IGNORECASE)


class Unavailable(Exception):
    """An engine that this host cannot run; the text says what is missing."""


class Device(msgspec.Struct, frozen=True):
    """The first device."""

    name: str
    sm: str
    """Compute capability, such as 9.0."""
    total_bytes: int
    driver: int
    """The newest CUDA version that the driver serves, such as 13000."""


def _runtime() -> Any:
    try:
        from cuda.bindings import runtime  # noqa: PLC0415  an extra
    except ImportError as error:
        raise Unavailable("cuda.bindings is not installed") from error
    return runtime


def fault_of(code: int, what: str) -> BackendFault:
    """The error of our own for a CUDA error code."""
    kind = BackendLost if code in FATAL else BackendRecoverable
    return kind(f"{what}: CUDA error {code}")


def fault_in(text: str, what: str) -> BackendFault:
    """The error of our own for a library's message, which may name a CUDA error code."""
    found = _IN_TEXT.search(text)
    if found is not None and int(found[1]) in FATAL:
        return BackendLost(f"{what}: {text}")
    return BackendRecoverable(f"{what}: {text}")


def ask(result: tuple[Any, ...], what: str) -> Any:
    """What a call of the runtime gives beside its error code; raises BackendFault."""
    code, *values = result
    if int(code):
        raise fault_of(int(code), what)
    return values[0] if len(values) == 1 else tuple(values)


def probe() -> Device:
    """The device that this process would use; raises Unavailable. Never crashes."""
    runtime = _runtime()
    code, count = runtime.cudaGetDeviceCount()
    if int(code) or not count:
        raise Unavailable(f"no CUDA device: error {int(code)}")
    try:
        found = ask(runtime.cudaGetDeviceProperties(0), "properties")
        driver = ask(runtime.cudaDriverGetVersion(), "driver version")
    except BackendFault as error:
        raise Unavailable(str(error)) from error
    return Device(
        found.name.decode(), f"{found.major}.{found.minor}", int(found.totalGlobalMem), int(driver)
    )


def free_bytes() -> int:
    """Device memory that nobody holds now."""
    free, _ = ask(_runtime().cudaMemGetInfo(), "memory")
    return int(free)


class Stream:
    """A stream that does not wait for the default one."""

    def __init__(self) -> None:
        runtime = _runtime()
        self._runtime = runtime
        self.handle = ask(
            runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking), "stream"
        )

    def wait(self) -> None:
        """Block until all that was queued is done; raises what went wrong in it."""
        ask(self._runtime.cudaStreamSynchronize(self.handle), "synchronize")

    def follow(self, event: Event) -> None:
        """Let what is queued from now on wait for an event of another stream."""
        ask(self._runtime.cudaStreamWaitEvent(self.handle, event.handle, 0), "wait for an event")

    def close(self) -> None:
        """Free the stream."""
        self._runtime.cudaStreamDestroy(self.handle)


class Event:
    """A point in a stream's work that others can wait for."""

    def __init__(self) -> None:
        runtime = _runtime()
        self._runtime = runtime
        # whoever waits sleeps: a spinning thread takes its core from the event loop
        flags = runtime.cudaEventDisableTiming | runtime.cudaEventBlockingSync
        self.handle = ask(runtime.cudaEventCreateWithFlags(flags), "event")

    def record(self, stream: Stream) -> None:
        """Stand for all that the stream has queued so far."""
        ask(self._runtime.cudaEventRecord(self.handle, stream.handle), "record an event")

    def wait(self) -> None:
        """Block until that is done; raises what went wrong in it."""
        ask(self._runtime.cudaEventSynchronize(self.handle), "synchronize")

    def close(self) -> None:
        """Free the event."""
        self._runtime.cudaEventDestroy(self.handle)


class Graph:
    """Launches that were captured once and are replayed as one."""

    def __init__(self, executable: Any) -> None:
        self._runtime = _runtime()
        self._executable = executable

    def launch(self, stream: Stream) -> None:
        """Queue the replay; raises BackendFault."""
        ask(self._runtime.cudaGraphLaunch(self._executable, stream.handle), "graph launch")

    def close(self) -> None:
        """Free the graph."""
        self._runtime.cudaGraphExecDestroy(self._executable)


def capture(stream: Stream, enqueue: Callable[[], None]) -> Graph | None:
    """What `enqueue` queues, as a graph; None if it cannot be captured."""
    runtime = _runtime()
    mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    ask(runtime.cudaStreamBeginCapture(stream.handle, mode), "begin capture")
    try:
        enqueue()
    except BackendRecoverable:
        captured = None
    else:
        captured = True
    code, graph = runtime.cudaStreamEndCapture(stream.handle)  # must end, whatever happened
    if captured is None or int(code):
        runtime.cudaGetLastError()  # a failed capture leaves its error behind
        return None
    code, executable = runtime.cudaGraphInstantiate(graph, 0)
    runtime.cudaGraphDestroy(graph)
    if int(code):
        runtime.cudaGetLastError()
        return None
    return Graph(executable)


def last_fault(what: str) -> BackendFault:
    """The error of our own for what the runtime last met; recoverable if it met nothing."""
    (code,) = _runtime().cudaPeekAtLastError()
    return fault_of(int(code), what)


class Slab:
    """Arrays of fixed shapes side by side, in pinned host memory and on the device.

    One copy moves all of them.
    """

    def __init__(self, layout: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> None:
        self._runtime = _runtime()
        starts: dict[str, int] = {}
        end = 0
        for name, (shape, dtype) in layout.items():
            starts[name] = end
            size = prod(shape) * dtype.itemsize
            end += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
        self.bytes = end
        self._device = int(ask(self._runtime.cudaMalloc(end), "device memory"))
        try:
            self._host = int(ask(self._runtime.cudaHostAlloc(end, 0), "pinned memory"))
        except BackendFault:
            self._runtime.cudaFree(self._device)
            raise
        self.addresses = {name: self._device + start for name, start in starts.items()}
        whole = np.ctypeslib.as_array((ctypes.c_uint8 * end).from_address(self._host))
        whole[:] = 0
        self.arrays: dict[str, NDArray[Any]] = {}
        for name, (shape, dtype) in layout.items():
            part = whole[starts[name] : starts[name] + prod(shape) * dtype.itemsize]
            self.arrays[name] = part.view(dtype).reshape(shape)

    def upload(self, stream: Stream) -> None:
        """Queue the copy to the device."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        args = (self._device, self._host, self.bytes, kind, stream.handle)
        ask(self._runtime.cudaMemcpyAsync(*args), "copy to the device")

    def download(self, stream: Stream) -> None:
        """Queue the copy to the host."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        args = (self._host, self._device, self.bytes, kind, stream.handle)
        ask(self._runtime.cudaMemcpyAsync(*args), "copy to the host")

    def close(self) -> None:
        """Free both memories; the arrays must not be touched again."""
        self.arrays.clear()
        self._runtime.cudaFree(self._device)
        self._runtime.cudaFreeHost(self._host)
