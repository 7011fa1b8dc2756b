"""Graphs for a CUDA device: half precision, and attention as one operator of ONNX Runtime's own.

Both score as the plain graph does, within half precision's error.
"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from models.blocks import Block, HeadedAttention
from models.export import EPSILON, OPSET, Exporter, Graph
from models.network import Network

_CONTRIB = "com.microsoft"
_ALIGNED_ROWS = 8
"""ONNX Runtime's fused attention with a bias wants multiples of this many query rows."""
_NEVER = -1e4
"""Masks the rows that only fill up to a multiple; a half can hold it."""


class FusedExporter(Exporter):
    """Writes attention, GELU, and sums that are normalized with ONNX Runtime's own operators."""

    opsets: ClassVar[dict[str, int]] = {"": OPSET, _CONTRIB: 1}

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        assert not self.preset.folded, "folded attention has no fused operator"
        self._filling = -self.preset.history_len % _ALIGNED_ROWS

    def model(self) -> onnx.ModelProto:
        self.score(self.encode())
        self.graph.nodes = _with_skip_norms(self.graph)
        return self._packed()

    def _opened(self, x: str) -> str:
        if not self._filling:
            return x
        pads = self.graph.constant("fill_rows", np.array([0, 0, 0, 0, self._filling, 0]))
        return self.graph.op("Pad", x, pads)

    def _closed(self, x: str) -> str:
        if not self._filling:
            return x
        g, rows = self.graph, self.preset.history_len
        return g.op("Slice", x, *(g.constant(f"slice_{at}", np.array([at])) for at in (0, rows, 1)))

    def _head_user(self, context: str) -> str:
        """The context alone: wide matrices made for each user cost more than their use."""
        return context

    def _head(self, x: str, user: str) -> str:
        g, net = self.graph, self.network
        both = g.op("Concat", x, g.op("Mul", x, user), axis=-1)
        weight = torch.cat([net.head_candidate, net.head_product])
        return g.op("MatMul", both, g.constant("head_weight", weight))

    def _joined(self, rows: str, context: str) -> str:
        return self.graph.op("Concat", rows, context, axis=1)

    def _keys(self, rows: str, name: str, block: Block) -> str:
        assert isinstance(block.attention, HeadedAttention)
        return self._linear(rows, f"{name}.key", block.attention.key)

    def _values(self, rows: str, name: str, block: Block) -> str:
        assert isinstance(block.attention, HeadedAttention)
        return self._linear(rows, f"{name}.value", block.attention.value)

    def _attend(
        self, queries: str, keys: str, values: str, *, mask: str, name: str, block: Block
    ) -> str:
        g, attention = self.graph, block.attention
        assert isinstance(attention, HeadedAttention)
        inside = name.startswith("encoder")
        rows = self.preset.history_len + self._filling if inside else self.preset.tile_width
        mixed = g.op(
            "MultiHeadAttention",
            self._linear(queries, f"{name}.query", attention.query),
            keys,
            values,
            "",
            "",
            self._bias(mask, rows, fill=inside),
            domain=_CONTRIB,
            num_heads=self.preset.heads,
        )
        return self._linear(mixed, f"{name}.out", attention.out)

    def _bias(self, mask: str, query_rows: int, *, fill: bool) -> str:
        """The mask [B, 1, 1, K] as a bias [B, 1, Q, K]; made once for all layers."""
        g = self.graph
        name = f"{mask}.bias{query_rows}"
        if any(name in node.output for node in g.nodes):
            return name
        if fill and self._filling:
            pads = g.constant("fill_keys", np.array([0] * 7 + [self._filling]))
            mask = g.op("Pad", mask, pads, g.constant("never", np.array(_NEVER, np.float32)))
        zeros = g.constant(f"zeros{query_rows}", np.zeros((1, 1, query_rows, 1), np.float32))
        return g.op("Add", mask, zeros, output=name)

    def _gelu(self, x: str) -> str:
        return self.graph.op("Gelu", x, domain=_CONTRIB)


def _with_skip_norms(graph: Graph) -> list[onnx.NodeProto]:
    """The nodes with each sum that is normalized next, and its bias, as one operator."""
    made = {name: node for node in graph.nodes for name in node.output}
    uses = Counter(name for node in graph.nodes for name in node.input)
    fused: dict[str, onnx.NodeProto] = {}
    """By the name of the sum."""
    gone: set[str] = set()
    """First outputs of nodes that a fused one stands for."""
    for norm in graph.nodes:
        total = made.get(norm.input[0])
        if norm.op_type != "LayerNormalization" or total is None or total.op_type != "Add":
            continue
        skip, added = total.input
        if total.output[0] in fused or {skip, added} & graph.constants.keys():
            continue
        inputs = [added, skip, *norm.input[1:]]
        inner = made.get(added)
        if inner is not None and uses[added] == 1 and _adds_bias(inner, graph):
            inputs = [inner.input[0], skip, *norm.input[1:], inner.input[1]]
            gone.add(added)
        fused[total.output[0]] = helper.make_node(
            "SkipLayerNormalization",
            inputs,
            [norm.output[0], "", "", total.output[0]],
            name=f"n_skip_{norm.output[0]}",
            domain=_CONTRIB,
            epsilon=EPSILON,
        )
        gone.add(norm.output[0])
    kept = [node for node in graph.nodes if node.output[0] not in gone]
    return [fused.get(node.output[0], node) for node in kept]


def _adds_bias(node: onnx.NodeProto, graph: Graph) -> bool:
    if node.op_type != "Add" or (constant := graph.constants.get(node.input[1])) is None:
        return False
    return len(constant.dims) == 1


def to_fused_onnx(network: Network) -> bytes:
    """The network's ONNX file for ONNX Runtime on a CUDA device alone."""
    graph: bytes = FusedExporter(network).model().SerializeToString()
    return graph


def to_fp16(graph: bytes) -> bytes:
    """The same graph in half precision; inputs and logits keep their types."""
    model = onnx.load_from_string(graph)
    body = model.graph
    for tensor in body.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            halves = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(halves, tensor.name))
    renamed = {entry.name: f"{entry.name}_half" for entry in [*body.input, *body.output]}
    floats = {entry.name for entry in body.input if _is_float(entry)}
    outputs = {entry.name for entry in body.output}
    for node in body.node:
        for at, name in enumerate(node.input):
            if name in floats:
                node.input[at] = renamed[name]
        for at, name in enumerate(node.output):
            if name in outputs:
                node.output[at] = renamed[name]
    down = [_cast(name, renamed[name], TensorProto.FLOAT16) for name in sorted(floats)]
    up = [_cast(renamed[name], name, TensorProto.FLOAT) for name in sorted(outputs)]
    nodes = [*down, *body.node, *up]
    del body.node[:]
    body.node.extend(nodes)
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


def _is_float(entry: onnx.ValueInfoProto) -> bool:
    return bool(entry.type.tensor_type.elem_type == TensorProto.FLOAT)


def _cast(source: str, target: str, kind: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [target], name=f"cast_{target}", to=kind)
