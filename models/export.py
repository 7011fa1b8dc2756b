"""Network to ONNX: the graph is written by hand, for few and wide operators.

No Shape operator and no Expand; users and tiles are dynamic. The result is checked against
PyTorch before it is handed out.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, cast

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from models.blocks import Block, FoldedAttention, HeadedAttention
from models.network import Network
from service.encoding.history import CONTEXT_WIDTH, HISTORY_WIDTH
from service.encoding.items import CANDIDATE_WIDTH

OPSET = 17
IR_VERSION = 8
EPSILON = 1e-5


class Graph:
    """A growing ONNX graph: each call adds one node or one constant and returns its name."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}

    def op(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        name = output or f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name=f"n_{name}", **attributes))
        return name

    def constant(self, name: str, value: NDArray[np.generic] | Tensor) -> str:
        array = value.detach().numpy() if isinstance(value, Tensor) else value
        if name not in self.constants:
            self.constants[name] = numpy_helper.from_array(np.ascontiguousarray(array), name)
        return name

    def shape(self, *dims: int) -> str:
        """A target of Reshape: 0 keeps a dimension, -1 takes the rest."""
        name = "shape_" + "_".join(str(dim).replace("-", "rest") for dim in dims)
        return self.constant(name, np.array(dims, np.int64))

    def axes(self, *axes: int) -> str:
        name = "axes_" + "_".join(str(axis) for axis in axes)
        return self.constant(name, np.array(axes, np.int64))


class Exporter:
    """Writes one network's graph."""

    opsets: ClassVar[dict[str, int]] = {"": OPSET}

    def __init__(self, network: Network) -> None:
        self.network = network
        self.preset = network.preset
        self.graph = Graph()

    def model(self) -> onnx.ModelProto:
        self.score(self.encode())
        return self._packed()

    def _packed(self) -> onnx.ModelProto:
        """The nodes so far as a checked file."""
        length, width = self.preset.history_len, self.preset.tile_width
        inputs = [
            _value("hist_ids", TensorProto.INT32, ["users", length, HISTORY_WIDTH]),
            _value("hist_age", TensorProto.INT32, ["users", length]),
            _value("hist_mask", TensorProto.FLOAT, ["users", length]),
            _value("ctx_ids", TensorProto.INT32, ["users", CONTEXT_WIDTH]),
            _value("cand_ids", TensorProto.INT32, ["tiles", width, CANDIDATE_WIDTH]),
            _value("tile_user", TensorProto.INT32, ["tiles"]),
        ]
        graph = helper.make_graph(
            self.graph.nodes,
            "rank",
            inputs,
            [_value("logits", TensorProto.FLOAT, ["tiles", width, 2])],
            list(self.graph.constants.values()),
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid(*opset) for opset in self.opsets.items()],
            producer_name="ranker",
        )
        model.ir_version = IR_VERSION
        onnx.checker.check_model(model, full_check=True)
        return model

    def encode(self) -> dict[str, str]:
        """Nodes for users; the names of what scoring gathers by tile."""
        g, net = self.graph, self.network
        x = self._embed("hist_ids", net.row_starts(HISTORY_WIDTH))
        x = g.op("Add", x, g.constant("place", net.place))
        x = self._opened(self._norm(x, "history_norm", net.history_norm))
        mask = g.op("Unsqueeze", "hist_mask", g.axes(1, 2))  # [B, 1, 1, L]
        for at, block in enumerate(net.encoder):
            assert isinstance(block, Block)
            name = f"encoder{at}"
            rows = self._norm(x, f"{name}.norm1", block.norm1)
            keys, values = self._keys(rows, name, block), self._values(rows, name, block)
            x = g.op("Add", x, self._attend(rows, keys, values, mask=mask, name=name, block=block))
            x = self._feed(x, name, block)
        x = self._closed(x)
        aged = g.op("Add", x, g.op("Gather", g.constant("age", net.age), "hist_age"))
        pool = g.op("MatMul", aged, g.constant("pool", net.pool[:, None]))  # [B, L, 1]
        pool = g.op("Add", g.op("Reshape", pool, g.shape(0, 1, -1)), self._row_mask())
        pooled = g.op("MatMul", g.op("Softmax", pool, axis=-1), x)  # [B, 1, D]
        context = self._embed("ctx_ids", [net.starts[2]] * CONTEXT_WIDTH, keep_axis=True)
        context = self._norm(g.op("Add", context, pooled), "context_norm", net.context_norm)
        key_rows, value_rows = self._joined(aged, context), self._joined(x, context)
        encoded = {"mask": g.op("Pad", mask, g.constant("pads", np.array([0] * 7 + [1])))}
        for at, block in enumerate(net.cross):
            assert isinstance(block, Block)
            encoded[f"keys{at}"] = self._keys(key_rows, f"cross{at}", block)
            encoded[f"values{at}"] = self._values(value_rows, f"cross{at}", block)
        encoded["head_bias"] = self._linear(context, "head_context", net.head_context)
        encoded["head_user"] = self._head_user(context)
        return encoded

    def score(self, encoded: dict[str, str]) -> None:
        g, net = self.graph, self.network
        tiles = {
            name: g.op("Gather", value, "tile_user", output=f"tile_{name}")
            for name, value in encoded.items()
        }
        x = self._embed("cand_ids", net.row_starts(CANDIDATE_WIDTH))
        for at, block in enumerate(net.cross):
            assert isinstance(block, Block)
            name = f"cross{at}"
            rows = self._norm(x, f"{name}.norm1", block.norm1)
            keys, values = tiles[f"keys{at}"], tiles[f"values{at}"]
            x = g.op(
                "Add",
                x,
                self._attend(rows, keys, values, mask=tiles["mask"], name=name, block=block),
            )
            x = self._feed(x, name, block)
        hidden = g.op("Add", self._head(x, tiles["head_user"]), tiles["head_bias"])
        self._linear(g.op("Relu", hidden), "head_out", net.head_out, output="logits")

    def _opened(self, x: str) -> str:
        """The history's rows as the encoder takes them."""
        return x

    def _closed(self, x: str) -> str:
        """The encoder's rows as the history's own [B, L, D]."""
        return x

    def _head_user(self, context: str) -> str:
        """What the head's first layer needs of a user: its whole matrix [B, D, hidden]."""
        g, net = self.graph, self.network
        column = g.op("Reshape", context, g.shape(0, -1, 1))  # [B, D, 1]
        product = g.op("Mul", column, g.constant("head_product", net.head_product))
        return g.op("Add", product, g.constant("head_candidate", net.head_candidate))

    def _head(self, x: str, user: str) -> str:
        """The head's first layer without its bias, of each tile's user."""
        return self.graph.op("MatMul", x, user)

    def _row_mask(self) -> str:
        return self.graph.op("Unsqueeze", "hist_mask", self.graph.axes(1))  # [B, 1, L]

    def _embed(self, ids: str, starts: list[int], *, keep_axis: bool = False) -> str:
        g = self.graph
        offsets = g.constant(f"{ids}.starts", np.array(starts, np.int32))
        rows = g.op("Gather", g.constant("table", self.network.table()), g.op("Add", ids, offsets))
        axis = g.axes(-2)
        summed = g.op("ReduceSum", rows, axis, keepdims=int(keep_axis))
        project = self.network.project
        return (
            summed if isinstance(project, nn.Identity) else self._linear(summed, "project", project)
        )

    def _norm(self, x: str, name: str, norm: nn.LayerNorm) -> str:
        g = self.graph
        scale, bias = (
            g.constant(f"{name}.scale", norm.weight),
            g.constant(f"{name}.bias", norm.bias),
        )
        return g.op("LayerNormalization", x, scale, bias, axis=-1, epsilon=EPSILON)

    def _linear(self, x: str, name: str, linear: nn.Module, *, output: str = "") -> str:
        assert isinstance(linear, nn.Linear)
        g = self.graph
        weight = g.constant(f"{name}.weight", linear.weight.T)
        bias = cast(Tensor | None, linear.bias)
        if bias is None:
            return g.op("MatMul", x, weight, output=output)
        product = g.op("MatMul", x, weight)
        return g.op("Add", product, g.constant(f"{name}.bias", bias), output=output)

    def _feed(self, x: str, name: str, block: Block) -> str:
        g = self.graph
        hidden = self._linear(self._norm(x, f"{name}.norm2", block.norm2), f"{name}.up", block.up)
        hidden = g.op("Relu", hidden) if block.activation == "relu" else self._gelu(hidden)
        return g.op("Add", x, self._linear(hidden, f"{name}.down", block.down))

    def _gelu(self, x: str) -> str:
        g = self.graph
        root = g.constant("sqrt2", np.array(math.sqrt(2), np.float32))
        one, half = (g.constant(f"c{v}", np.array(v, np.float32)) for v in (1.0, 0.5))
        curve = g.op("Add", g.op("Erf", g.op("Div", x, root)), one)
        return g.op("Mul", g.op("Mul", x, curve), half)

    def _joined(self, rows: str, context: str) -> str:
        """What a user's candidates attend to, [B, K, D]; [B * K, D] where heads are not folded.

        OpenVINO moves a quantizer that follows a Concat before it, and then cannot broadcast its
        zero point; past a Reshape it leaves it in its place.
        """
        joined = self.graph.op("Concat", rows, context, axis=1)
        if self.preset.folded:
            return joined
        return self.graph.op("Reshape", joined, self.graph.shape(-1, self.preset.width))

    def _keys(self, rows: str, name: str, block: Block) -> str:
        g, attention = self.graph, block.attention
        if isinstance(attention, FoldedAttention):
            return self._folded_rows(rows, f"{name}.key", attention.key)
        projected = self._linear(rows, f"{name}.key", attention.key)
        return g.op("Transpose", self._split_keys(projected, name), perm=[0, 2, 3, 1])

    def _values(self, rows: str, name: str, block: Block) -> str:
        g, attention = self.graph, block.attention
        if isinstance(attention, FoldedAttention):
            return self._folded_rows(rows, f"{name}.value", attention.value)
        projected = self._linear(rows, f"{name}.value", attention.value)
        return g.op("Transpose", self._split_keys(projected, name), perm=[0, 2, 1, 3])

    def _split_keys(self, rows: str, name: str) -> str:  # [B * K, H * W] -> [B, K, H, W]
        g, preset = self.graph, self.preset
        count = preset.history_len + (0 if name.startswith("encoder") else 1)
        return g.op("Reshape", rows, g.shape(-1, count, preset.heads, preset.inner_width))

    def _folded_rows(self, rows: str, name: str, weight: Tensor) -> str:
        g = self.graph
        each = g.op("MatMul", g.op("Unsqueeze", rows, g.axes(1)), g.constant(name, weight))
        return g.op("Reshape", each, g.shape(0, -1, self.preset.width))  # [B, H * K, D]

    def _split(self) -> str:
        heads = self.preset.heads
        return self.graph.shape(0, -1, heads, self.preset.inner_width)

    def _attend(
        self, queries: str, keys: str, values: str, *, mask: str, name: str, block: Block
    ) -> str:
        g, attention, heads = self.graph, block.attention, self.preset.heads
        if isinstance(attention, FoldedAttention):
            scores = g.op("MatMul", queries, g.op("Transpose", keys, perm=[0, 2, 1]))
            scores = g.op("Add", g.op("Reshape", scores, g.shape(0, 0, heads, -1)), mask)
            weights = g.op("Reshape", g.op("Softmax", scores, axis=-1), g.shape(0, 0, -1))
            return g.op("MatMul", weights, values)
        assert isinstance(attention, HeadedAttention)
        split = g.op(
            "Reshape", self._linear(queries, f"{name}.query", attention.query), self._split()
        )
        split = g.op("Transpose", split, perm=[0, 2, 1, 3])
        scale = g.constant("scale", np.array(self.preset.inner_width**-0.5, np.float32))
        scores = g.op("Add", g.op("Mul", g.op("MatMul", split, keys), scale), mask)
        mixed = g.op("MatMul", g.op("Softmax", scores, axis=-1), values)
        merged = g.op("Transpose", mixed, perm=[0, 2, 1, 3])
        merged = g.op("Reshape", merged, g.shape(0, 0, -1))
        return self._linear(merged, f"{name}.out", attention.out)


def _value(name: str, kind: int, shape: list[str | int]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def to_onnx(network: Network) -> bytes:
    """The network's ONNX file, without the position bias."""
    return bytes(Exporter(network).model().SerializeToString())
