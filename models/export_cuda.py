"""Graphs for a CUDA device: half precision, and attention as one operator of ONNX Runtime's own.

Both score as the plain graph does, within half precision's error.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from models.blocks import Block, HeadedAttention
from models.export import OPSET, Exporter
from models.network import Network

_CONTRIB = "com.microsoft"
_ALIGNED_ROWS = 8
"""ONNX Runtime's fused attention with a bias wants multiples of this many query rows."""
_NEVER = -1e4
"""Masks the rows that only fill up to a multiple; a half can hold it."""


class FusedExporter(Exporter):
    """Writes attention as MultiHeadAttention and GELU as Gelu, of ONNX Runtime's own domain."""

    opsets: ClassVar[dict[str, int]] = {"": OPSET, _CONTRIB: 1}

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        assert not self.preset.folded, "folded attention has no fused operator"
        self._filling = -self.preset.history_len % _ALIGNED_ROWS

    def _norm(self, x: str, name: str, norm: nn.LayerNorm) -> str:
        rows = super()._norm(x, name, norm)
        if not (self._filling and name.startswith("encoder") and name.endswith("norm1")):
            return rows
        pads = self.graph.constant("fill_rows", np.array([0, 0, 0, 0, self._filling, 0]))
        return self.graph.op("Pad", rows, pads)

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
        query_rows = self.preset.history_len if inside else self.preset.tile_width
        filled = query_rows + self._filling if inside else query_rows
        mixed = g.op(
            "MultiHeadAttention",
            self._linear(queries, f"{name}.query", attention.query),
            keys,
            values,
            "",
            "",
            self._bias(mask, filled, fill=inside),
            domain=_CONTRIB,
            num_heads=self.preset.heads,
        )
        out = self._linear(mixed, f"{name}.out", attention.out)
        if filled == query_rows:
            return out
        ends = [g.constant(f"slice_{at}", np.array([at])) for at in (0, query_rows, 1)]
        return g.op("Slice", out, *ends)

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
