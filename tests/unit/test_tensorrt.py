# ruff: noqa: N802, N815  the library's own names
"""The TensorRT backend against a stand-in of the documented API, kept in this file alone.

Device memory is host memory here, and an engine scores with ONNX Runtime on the shipped
graph, so that shapes, addresses, padding and replays must be right for the scores to be.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from service.bundle import BatchSpec, Bundle
from service.encoding.batch import Batch
from service.errors import BackendLost, BackendRecoverable, PlanFault
from service.inference.backends import cuda, side_process, tensorrt
from service.inference.backends.buckets import Bucket, Buckets, input_layout, resized
from service.inference.backends.onnx import OnnxCpu
from service.inference.backends.pipeline import PLACES
from service.inference.backends.plans import PlanCache
from service.inference.parity import Golden, check_parity, read_golden

SHOP = Bundle.open(next((Path(__file__).parents[2] / "models" / "store" / "shop").iterdir()))
SPEC = SHOP.manifest.input
GRAPH = SHOP.read(SHOP.manifest.graphs["fp32"])
LIMITS = BatchSpec(max_users=16, tile_buckets=(1, 8, 160))


COPYING, COMPUTING = 0, 1
REPLAYED = [
    f"upload in {COPYING}",
    f"record in {COPYING}",
    f"{COMPUTING} follows {COPYING}",
    "replay",
    f"download in {COMPUTING}",
    f"record in {COMPUTING}",
]


class Runtime:
    """The calls of cuda.bindings.runtime that we use.

    Work is queued, and done as late as it may be: only when somebody waits for it, and only
    as much of it as the wait asks for. What lacks an order gives wrong scores.
    """

    cudaStreamNonBlocking = 1
    cudaEventDisableTiming = 2
    cudaEventBlockingSync = 1
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.buffers: dict[int, Any] = {}
        self.recording: list[Callable[[], None]] | None = None
        self.error = 0
        """What the next synchronization, and whoever asks for the last error, will tell."""
        self.capture_error = 0
        self.sm = (8, 6)
        self._queues: list[deque[Callable[[], object]]] = []
        self._recorded: dict[int, tuple[int, int]] = {}
        """By event: in which stream, and how many times."""
        self._reached: dict[int, int] = {}

    def queue(self, stream: int, work: Callable[[], object]) -> None:
        self._queues[stream].append(work)

    def _run_until(self, event: int, times: int) -> None:
        stream, _ = self._recorded[event]
        while self._reached.get(event, 0) < times:
            self._queues[stream].popleft()()

    def cudaGetDeviceCount(self) -> tuple[int, int]:
        return 0, 1

    def cudaGetDeviceProperties(self, _: int) -> tuple[int, Any]:
        major, minor = self.sm
        return 0, SimpleNamespace(name=b"stand-in", major=major, minor=minor, totalGlobalMem=1)

    def cudaDriverGetVersion(self) -> tuple[int, int]:
        return 0, 13_000

    def cudaStreamCreateWithFlags(self, _: int) -> tuple[int, int]:
        self._queues.append(deque())
        return 0, len(self._queues) - 1

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:
        self.calls.append("synchronize")
        while self._queues[stream]:
            self._queues[stream].popleft()()
        return (self.error,)

    def cudaEventCreateWithFlags(self, _: int) -> tuple[int, int]:
        event = len(self._recorded)
        self._recorded[event] = (0, 0)
        return 0, event

    def cudaEventRecord(self, event: int, stream: int) -> tuple[int]:
        self.calls.append(f"record in {stream}")
        times = self._recorded[event][1] + 1
        self._recorded[event] = (stream, times)
        self.queue(stream, lambda: self._reached.__setitem__(event, times))
        return (0,)

    def cudaStreamWaitEvent(self, stream: int, event: int, _: int) -> tuple[int]:
        self.calls.append(f"{stream} follows {self._recorded[event][0]}")
        times = self._recorded[event][1]
        self.queue(stream, lambda: self._run_until(event, times))
        return (0,)

    def cudaEventSynchronize(self, event: int) -> tuple[int]:
        self.calls.append("wait")
        self._run_until(event, self._recorded[event][1])
        return (self.error,)

    def cudaEventDestroy(self, _: int) -> tuple[int]:
        self.calls.append("free event")
        return (0,)

    def cudaPeekAtLastError(self) -> tuple[int]:
        return (self.error,)

    def cudaGetLastError(self) -> tuple[int]:
        self.error, told = 0, self.error
        return (told,)

    def cudaMalloc(self, size: int) -> tuple[int, int]:
        buffer = ctypes.create_string_buffer(size)
        self.buffers[ctypes.addressof(buffer)] = buffer
        return 0, ctypes.addressof(buffer)

    def cudaHostAlloc(self, size: int, _: int) -> tuple[int, int]:
        return self.cudaMalloc(size)

    def cudaMemcpyAsync(self, to: int, of: int, size: int, kind: int, stream: int) -> tuple[int]:
        self.calls.append(f"{'up' if kind == 1 else 'down'}load in {stream}")
        self.queue(stream, partial(ctypes.memmove, to, of, size))
        return (0,)

    def cudaStreamBeginCapture(self, _: int, __: int) -> tuple[int]:
        self.recording = []
        return (0,)

    def cudaStreamEndCapture(self, _: int) -> tuple[int, Any]:
        recorded, self.recording = self.recording, None
        return self.capture_error, recorded

    def cudaGraphInstantiate(self, graph: Any, _: int) -> tuple[int, Any]:
        return 0, graph

    def cudaGraphLaunch(self, graph: Any, stream: int) -> tuple[int]:
        self.calls.append("replay")
        for launch in graph:
            self.queue(stream, launch)
        return (0,)

    def cudaGraphDestroy(self, _: Any) -> tuple[int]:
        return (0,)

    def cudaGraphExecDestroy(self, _: Any) -> tuple[int]:
        self.calls.append("free graph")
        return (0,)

    def cudaFree(self, at: int) -> tuple[int]:
        self.calls.append("free memory")
        del self.buffers[at]
        return (0,)

    cudaFreeHost = cudaFree

    def cudaStreamDestroy(self, _: int) -> tuple[int]:
        self.calls.append("free stream")
        return (0,)


class Context:
    """IExecutionContext."""

    def __init__(self, runtime: Runtime, scorer: OnnxCpu) -> None:
        self.runtime = runtime
        self.scorer = scorer
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.works = True

    def set_optimization_profile_async(self, at: int, _: int) -> bool:
        self.runtime.calls.append(f"profile {at}")
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.runtime.calls.append("shape")
        self.shapes[name] = shape
        return True

    def infer_shapes(self) -> list[str]:
        self.runtime.calls.append("infer")
        return [name for name in Batch.__struct_fields__ if name not in self.shapes]

    def set_tensor_address(self, name: str, at: int) -> bool:
        self.runtime.calls.append("address")
        self.addresses[name] = at
        return True

    def execute_async_v3(self, stream: int) -> bool:
        self.runtime.calls.append("enqueue")
        shapes, addresses = dict(self.shapes), dict(self.addresses)

        def launch() -> None:
            batch = Batch(
                **{
                    name: _view(
                        addresses[name], shape, np.float32 if name == "hist_mask" else np.int32
                    )
                    for name, shape in shapes.items()
                }
            )
            logits = self.scorer.score(batch)
            _view(addresses["logits"], logits.shape, np.float32)[:] = logits

        if self.runtime.recording is None:
            self.runtime.queue(stream, launch)
        else:
            self.runtime.recording.append(launch)
        return self.works


def _view(at: int, shape: tuple[int, ...], dtype: type[Any]) -> Any:
    size = prod(shape) * np.dtype(dtype).itemsize
    bytes_ = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(at))
    return bytes_.view(dtype).reshape(shape)


class Engine:
    """ICudaEngine."""

    def __init__(self, runtime: Runtime) -> None:
        self.tensors = [*Batch.__struct_fields__, "logits"]
        self.num_io_tensors = len(self.tensors)
        self.num_optimization_profiles = len(LIMITS.tile_buckets)
        self.contexts: list[Context] = []
        self._runtime = runtime
        self._scorer = OnnxCpu(GRAPH, precision="fp32")

    def get_tensor_name(self, at: int) -> str:
        return self.tensors[at]

    def create_execution_context(self) -> Context:
        context = Context(self._runtime, self._scorer)
        self.contexts.append(context)
        return context


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(cuda, "_runtime", lambda: runtime)
    return runtime


@pytest.fixture
def engine(runtime: Runtime) -> Engine:
    return Engine(runtime)


@pytest.fixture
def lib(engine: Engine) -> tensorrt.Library:
    found = SimpleNamespace(deserialize_cuda_engine=lambda plan: engine if plan else None)
    module = SimpleNamespace(Runtime=lambda _: found)
    return tensorrt.Library(module, "tensorrt", "11.4.0", object(), ["the last complaint"])


@pytest.fixture
def backend(lib: tensorrt.Library) -> Iterator[tensorrt.TensorRt]:
    backend = tensorrt.TensorRt(lib, b"plan", precision="fp32", spec=SPEC, limits=LIMITS)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def golden() -> Golden:
    return read_golden(SHOP)


def test_it_scores_the_golden_requests_plainly_and_from_a_graph(
    backend: tensorrt.TensorRt, golden: Golden, runtime: Runtime
) -> None:
    assert check_parity(backend, golden) < 1e-5
    assert runtime.calls.count("replay") == 1
    assert check_parity(backend, golden) < 1e-5
    assert runtime.calls.count("replay") == 2


def test_scores_do_not_depend_on_the_bucket_or_on_what_it_held_before(
    backend: tensorrt.TensorRt, golden: Golden
) -> None:
    reference = OnnxCpu(GRAPH, precision="fp32")
    for users, tiles in ((16, 160), (1, 1), (3, 7), (5, 8), (2, 3), (9, 31)):
        batch = resized(golden.batch, Bucket(users, tiles))
        np.testing.assert_allclose(backend.score(batch), reference.score(batch), atol=1e-5)


def test_a_context_is_prepared_in_the_order_that_the_library_asks_for(
    backend: tensorrt.TensorRt, golden: Golden, runtime: Runtime
) -> None:
    profiles = len(LIMITS.tile_buckets)
    assert runtime.calls == [
        word for at in range(profiles) for word in (f"profile {at}", "synchronize")
    ]
    runtime.calls.clear()
    backend.score(resized(golden.batch, Bucket(1, 1)))
    inputs = len(Batch.__struct_fields__)
    prepared = ["shape"] * inputs + ["infer"] + ["address"] * (inputs + 1)
    prepared += ["enqueue", "synchronize", "enqueue"]  # the last one is captured
    assert runtime.calls == [f"upload in {COMPUTING}", *prepared, *REPLAYED, "wait"]


def test_the_next_batch_is_copied_while_this_one_is_computed(
    backend: tensorrt.TensorRt, golden: Golden, runtime: Runtime
) -> None:
    reference = OnnxCpu(GRAPH, precision="fp32")
    batches = [resized(golden.batch, Bucket(users, 8)) for users in (7, 8, 6, 5)]
    for batch in batches[:2]:  # both places are captured
        backend.score(batch)
    runtime.calls.clear()
    begun = [backend.begin(batch) for batch in batches[:2]]
    assert runtime.calls == [*REPLAYED, *REPLAYED], "nobody waits between them"
    third: list[Any] = []
    thread = threading.Thread(target=lambda: third.append(backend.begin(batches[2])))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive(), "two places, and both are taken"
    scores = [begun[0]()]
    thread.join(10)
    scores += [begun[1](), third[0](), backend.score(batches[3])]
    for batch, logits in zip(batches, scores, strict=True):
        np.testing.assert_allclose(logits, reference.score(batch), atol=1e-5)


def test_a_batch_that_fails_leaves_its_place_to_the_next(
    backend: tensorrt.TensorRt, golden: Golden, engine: Engine
) -> None:
    for context in engine.contexts:
        context.works = False
    for _ in range(2 * PLACES + 1):
        with pytest.raises(BackendRecoverable):
            backend.score(golden.batch)
    for context in engine.contexts:
        context.works = True
    assert check_parity(backend, golden) < 1e-5


def test_what_cannot_be_captured_is_run_plainly(
    backend: tensorrt.TensorRt, golden: Golden, runtime: Runtime
) -> None:
    runtime.capture_error = 901
    assert check_parity(backend, golden) < 1e-5
    assert check_parity(backend, golden) < 1e-5
    assert "replay" not in runtime.calls


@pytest.mark.parametrize("code", sorted(cuda.FATAL))
def test_a_fatal_error_is_a_lost_device(
    backend: tensorrt.TensorRt, golden: Golden, runtime: Runtime, code: int
) -> None:
    backend.score(golden.batch)
    runtime.error = code
    with pytest.raises(BackendLost, match=str(code)):
        backend.score(golden.batch)


def test_want_of_memory_fails_the_batch_alone(
    backend: tensorrt.TensorRt, golden: Golden, runtime: Runtime
) -> None:
    backend.score(golden.batch)
    runtime.error = 2
    with pytest.raises(BackendRecoverable, match="CUDA error 2"):
        backend.score(golden.batch)
    runtime.error = 0
    assert check_parity(backend, golden) < 1e-5


def test_a_refused_launch_tells_the_librarys_reason(
    backend: tensorrt.TensorRt, golden: Golden, engine: Engine
) -> None:
    for context in engine.contexts:
        context.works = False
    with pytest.raises(BackendRecoverable, match="the last complaint"):
        backend.score(golden.batch)


def test_a_batch_over_the_largest_bucket_never_reaches_the_device(
    backend: tensorrt.TensorRt, golden: Golden, runtime: Runtime
) -> None:
    runtime.calls.clear()
    with pytest.raises(BackendRecoverable, match="over the largest bucket"):
        backend.score(resized(golden.batch, Bucket(1, 161)))
    assert runtime.calls == []


def test_a_plan_that_cannot_be_loaded_is_refused(lib: tensorrt.Library) -> None:
    with pytest.raises(PlanFault, match="the last complaint"):
        tensorrt.TensorRt(lib, b"", precision="fp32", spec=SPEC, limits=LIMITS)


def test_a_plan_with_other_tensors_is_refused(lib: tensorrt.Library, engine: Engine) -> None:
    engine.tensors[0] = "something"
    with pytest.raises(PlanFault, match="something"):
        tensorrt.TensorRt(lib, b"plan", precision="fp32", spec=SPEC, limits=LIMITS)


def test_everything_is_freed_graphs_first(
    lib: tensorrt.Library, golden: Golden, runtime: Runtime
) -> None:
    backend = tensorrt.TensorRt(lib, b"plan", precision="fp32", spec=SPEC, limits=LIMITS)
    backend.score(golden.batch)
    runtime.calls.clear()
    backend.close()
    assert runtime.calls[0] == "free graph"
    assert runtime.calls[-1] == "free stream"
    assert runtime.buffers == {}


def test_a_plan_of_another_host_is_refused_or_built_anew(
    lib: tensorrt.Library, runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds: list[str] = []

    def build(graph: bytes, *, sm: str, **_: object) -> bytes:
        builds.append(sm)
        return graph[:10]

    monkeypatch.setattr(tensorrt, "library", lambda: lib)
    monkeypatch.setattr(side_process, "build", build)
    monkeypatch.setattr(side_process, "check", lambda _: None)

    def opened(*, build: bool) -> None:
        tensorrt.open_plan(
            GRAPH,
            name="shop",
            precision="fp32",
            spec=SPEC,
            limits=LIMITS,
            plans=PlanCache(tmp_path),
            build=build,
        ).close()

    with pytest.raises(PlanFault, match="no plan"):
        opened(build=False)
    opened(build=True)
    opened(build=False)
    runtime.sm = (8, 9)
    with pytest.raises(PlanFault, match=r"sm is 8\.6, not 8\.9"):
        opened(build=False)
    opened(build=True)
    opened(build=False)
    assert builds == ["8.6", "8.9"]


def test_rtx_is_not_at_hand_on_hopper(
    lib: tensorrt.Library, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    rtx = tensorrt.Library(lib.module, tensorrt.RTX, "1.7.1", lib.logger, lib.complaints)
    monkeypatch.setattr(tensorrt, "library", lambda: rtx)
    runtime.sm = (9, 0)
    with pytest.raises(cuda.Unavailable, match=r"9\.0"):
        tensorrt.find_host()


def test_every_batch_up_to_the_limits_has_a_bucket() -> None:
    known = Buckets(LIMITS)
    batch = resized(read_golden(SHOP).batch, Bucket(1, 1))
    for users in range(1, LIMITS.max_users + 1):
        for tiles in range(users, LIMITS.tile_buckets[-1] + 1, 7):
            bucket = known.of(resized(batch, Bucket(users, tiles)))
            assert bucket in known.pairs
            assert bucket.users >= users
            assert bucket.tiles >= tiles
            assert input_layout(bucket, SPEC)["tile_user"][0] == (bucket.tiles,)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("CUDA failure 700: an illegal memory access was encountered ; GPU=0", BackendLost),
        ("CUDA failure 2: out of memory ; GPU=0", BackendRecoverable),
        ("CUBLAS failure 13: CUBLAS_STATUS_EXECUTION_FAILED", BackendRecoverable),
        ("Failed to allocate memory for requested buffer of size 719", BackendRecoverable),
    ],
)
def test_a_librarys_words_tell_a_fatal_error(text: str, kind: type[Exception]) -> None:
    assert type(cuda.fault_in(text, "ONNX Runtime")) is kind
