"""The graph in two files: one encodes users, the other scores their tiles.

So a user's encoding can be kept between requests.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx
from onnx import TensorProto, helper, shape_inference

from models.export import IR_VERSION, Exporter
from models.network import Network

USER_INPUTS = ("hist_ids", "hist_age", "hist_mask", "ctx_ids")


class Pair(NamedTuple):
    """Two ONNX files; the outputs of the first are inputs of the second."""

    encode: bytes
    score: bytes


def to_pair(network: Network) -> Pair:
    """Encoding of users [users, ...] by name, and logits of tiles from it."""
    whole = Exporter(network).model()
    encoder = Exporter(network)
    encoded = encoder.encode()
    names = {inside: name for name, inside in encoded.items()}
    for node in encoder.graph.nodes:
        for sides in (node.input, node.output):
            sides[:] = [names.get(entry, entry) for entry in sides]
    inputs = {entry.name: entry for entry in whole.graph.input}
    encode = _model(
        encoder,
        [inputs[name] for name in USER_INPUTS],
        [onnx.ValueInfoProto(name=name) for name in encoded],
    )
    encode = shape_inference.infer_shapes(encode, strict_mode=True)
    outputs = [_of_users(entry) for entry in encode.graph.output]
    del encode.graph.output[:]
    encode.graph.output.extend(outputs)
    scorer = Exporter(network)
    scorer.score({name: name for name in encoded})
    tiles = [entry for name, entry in inputs.items() if name not in USER_INPUTS]
    score = _model(scorer, [*outputs, *tiles], list(whole.graph.output))
    for model in (encode, score):
        onnx.checker.check_model(model, full_check=True)
    return Pair(encode.SerializeToString(), score.SerializeToString())


def _model(
    exporter: Exporter, inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]
) -> onnx.ModelProto:
    constants = list(exporter.graph.constants.values())
    graph = helper.make_graph(exporter.graph.nodes, "rank", inputs, outputs, constants)
    opsets = [helper.make_opsetid(*opset) for opset in exporter.opsets.items()]
    model = helper.make_model(graph, opset_imports=opsets, producer_name="ranker")
    model.ir_version = IR_VERSION
    return model


def _of_users(entry: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    """The same with its first dimension named; others are known or left open."""
    dims = entry.type.tensor_type.shape.dim
    shape = ["users", *(dim.dim_value or None for dim in dims[1:])]
    return helper.make_tensor_value_info(entry.name, TensorProto.FLOAT, shape)
