"""Quantized graphs: an fp32 ONNX graph is rewritten with Q/DQ nodes and INT8 embedding rows.

Only products with constant weights are quantized. Sums of embeddings, norms, softmax, masks,
residuals and the last layer keep their precision. Scales are constants of the graph, so a
score never depends on what shares the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from service.errors import RankerError

KEPT = ("head_out", "pool", "project")
"""Weights that stay as they are: the last layer, and two that read sums of embeddings."""
TABLE = "table"
_OPSET = 19
"""The first one with FP8."""
_IR_VERSION = 9


_BOUNDS: dict[int, tuple[float, float]] = {
    TensorProto.UINT8: (0.0, 255.0),
    TensorProto.INT8: (-127.0, 127.0),
    TensorProto.FLOAT8E4M3FN: (-448.0, 448.0),
}


class QuantizeFault(RankerError):
    """A graph that cannot be quantized; says why."""


class Scheme(msgspec.Struct, frozen=True):
    """Types of activations and weights, and how much of a weight's range is used."""

    activations: int
    weights: int
    weight_max: float

    @property
    def low(self) -> float:
        return _BOUNDS[self.activations][0]

    @property
    def high(self) -> float:
        return _BOUNDS[self.activations][1]

    @property
    def floating(self) -> bool:
        return self.activations == TensorProto.FLOAT8E4M3FN


CPU_INT8 = Scheme(TensorProto.UINT8, TensorProto.INT8, 63.0)
"""Seven bits of weights: without VNNI, sums of two 8-bit products overflow 16 bits."""
DEVICE_INT8 = Scheme(TensorProto.INT8, TensorProto.INT8, 127.0)
FP8 = Scheme(TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E4M3FN, 448.0)


class Range(msgspec.Struct, frozen=True):
    """The values that an activation is quantized over; 0 is within."""

    low: float
    high: float

    def scale(self, scheme: Scheme) -> tuple[float, int]:
        """The step between quantized values, and the one that means 0."""
        if scheme.activations == TensorProto.UINT8:
            step = max(self.high - self.low, 1e-9) / scheme.high
            return step, round(-self.low / step)
        return max(-self.low, self.high, 1e-9) / scheme.high, 0


def constant_products(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Each MatMul by a constant matrix that may be quantized."""
    constants = {entry.name for entry in model.graph.initializer}
    return [
        node
        for node in model.graph.node
        if node.op_type == "MatMul"
        and node.input[1] in constants
        and not node.input[1].startswith(KEPT)
    ]


def quantize_products(graph: bytes, ranges: Mapping[str, Range], scheme: Scheme) -> bytes:
    """The graph with Q/DQ before each constant product; raises QuantizeFault.

    One pair for each activation, however many products read it; weights are stored quantized,
    with a scale for each output channel.
    """
    model = onnx.load_from_string(graph)
    constants = {entry.name: entry for entry in model.graph.initializer}
    nodes: list[onnx.NodeProto] = []
    added: dict[str, onnx.TensorProto] = {}
    chosen = constant_products(model)
    if not chosen:
        raise QuantizeFault("the graph has no product with constant weights")
    places = {node.output[0] for node in chosen}
    seen: set[str] = set()
    for node in model.graph.node:
        if node.output[0] in places:
            source, weight = node.input
            if source not in ranges:
                raise QuantizeFault(f"{source} was not calibrated")
            if source not in seen:
                nodes += _pair(source, *ranges[source].scale(scheme), scheme, added)
            if weight not in seen:
                nodes.append(_stored(weight, constants.pop(weight), scheme, added))
            seen |= {source, weight}
            node.input[0], node.input[1] = f"{source}.dq", f"{weight}.dq"
        nodes.append(node)
    return _rewritten(model, nodes, [*constants.values(), *added.values()])


def quantize_table(graph: bytes) -> bytes:
    """The graph with 8-bit embedding rows, each with a scale of its own."""
    model = onnx.load_from_string(graph)
    constants = {entry.name: entry for entry in model.graph.initializer}
    if TABLE not in constants:
        raise QuantizeFault(f"the graph has no embedding table named {TABLE}")
    rows, scales = row_wise(numpy_helper.to_array(constants.pop(TABLE)))
    constants |= {
        name: numpy_helper.from_array(values, name)
        for name, values in ((f"{TABLE}.rows", rows), (f"{TABLE}.scales", scales))
    }
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.op_type == "Gather" and node.input[0] == TABLE:
            nodes += _gathered_rows(node)
        else:
            nodes.append(node)
    return _rewritten(model, nodes, list(constants.values()))


def row_wise(table: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Rows as int8 [R, E] and their scales [R, 1]: row = int8 * scale."""
    largest = np.abs(table).max(axis=1, keepdims=True)
    scales = (largest / 127).astype(np.float16)
    # a scale that was rounded down would cut the largest value off
    scales = np.where(scales * np.float32(127) < largest, np.nextafter(scales, np.inf), scales)
    steps = np.where(scales == 0, 1, scales).astype(np.float32)
    return np.rint(table / steps).clip(-127, 127).astype(np.int8), scales.astype(np.float16)


def _gathered_rows(gather: onnx.NodeProto) -> list[onnx.NodeProto]:
    ids, out = gather.input[1], gather.output[0]
    return [
        _node("Gather", [f"{TABLE}.rows", ids], f"{out}.int8"),
        _node("Cast", [f"{out}.int8"], f"{out}.wide", to=TensorProto.FLOAT),
        _node("Gather", [f"{TABLE}.scales", ids], f"{out}.half_scales"),
        _node("Cast", [f"{out}.half_scales"], f"{out}.scales", to=TensorProto.FLOAT),
        _node("Mul", [f"{out}.wide", f"{out}.scales"], out),
    ]


def _pair(
    source: str, step: float, zero: int, scheme: Scheme, added: dict[str, onnx.TensorProto]
) -> list[onnx.NodeProto]:
    scale, point = f"{source}.scale", f"{source}.zero"
    added[scale] = numpy_helper.from_array(np.array(step, np.float32), scale)
    added[point] = helper.make_tensor(point, scheme.activations, [], [zero])
    return [
        _node("QuantizeLinear", [source, scale, point], f"{source}.q"),
        _node("DequantizeLinear", [f"{source}.q", scale, point], f"{source}.dq"),
    ]


def _stored(
    weight: str, tensor: onnx.TensorProto, scheme: Scheme, added: dict[str, onnx.TensorProto]
) -> onnx.NodeProto:
    values = numpy_helper.to_array(tensor)
    # a stack of matrices has one scale: engines know none for each matrix and channel
    stacked = values.ndim > 2
    largest = np.abs(values).max(axis=None if stacked else 0)
    scales = np.array(np.maximum(largest / scheme.weight_max, 1e-9), np.float32)
    scaled = values / scales
    kind = helper.tensor_dtype_to_np_dtype(scheme.weights)
    whole = np.rint(scaled) if scheme.weights == TensorProto.INT8 else scaled
    names = [f"{weight}.q", f"{weight}.scale", f"{weight}.zero"]
    added[names[0]] = numpy_helper.from_array(whole.astype(kind), names[0])
    added[names[1]] = numpy_helper.from_array(scales, names[1])
    added[names[2]] = helper.make_tensor(names[2], scheme.weights, scales.shape, [0] * scales.size)
    return _node("DequantizeLinear", names, f"{weight}.dq", **({} if stacked else {"axis": 1}))


def _node(kind: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs, [output], name=f"n_{output}", **attributes)


def _rewritten(
    model: onnx.ModelProto, nodes: list[onnx.NodeProto], constants: list[onnx.TensorProto]
) -> bytes:
    body = model.graph
    del body.node[:], body.initializer[:]
    body.node.extend(nodes)
    body.initializer.extend(constants)
    for opset in model.opset_import:
        if opset.domain in {"", "ai.onnx"}:
            opset.version = max(opset.version, _OPSET)
    model.ir_version = max(model.ir_version, _IR_VERSION)
    onnx.checker.check_model(model, full_check=True)
    content: bytes = model.SerializeToString()
    return content
