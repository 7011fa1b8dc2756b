"""Building an engine plan: the ONNX graph sets precision, the profiles set sizes.

Runs in a side process, as a build takes long and a broken library may take the process down.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from service.bundle import InputSpec
from service.errors import PlanFault
from service.inference.backends.buckets import Bucket, input_layout
from service.inference.backends.plans import Profile
from service.inference.backends.tensorrt import RTX, Library

_WORKSPACE_BYTES = 2 << 30


def build_plan(
    lib: Library, graph: bytes, *, spec: InputSpec, profiles: Sequence[Profile], sm: str
) -> bytes:
    """A serialized engine for devices of one compute capability; raises PlanFault.

    TensorRT for RTX builds for any of its devices without having one; TensorRT measures its
    tactics on the device at hand.
    """
    trt = lib.module
    builder = trt.Builder(lib.logger)
    # 10.x has weakly typed networks by default; later versions ignore the flag
    flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    parser = trt.OnnxParser(network, lib.logger)
    if not parser.parse(graph):
        errors = [parser.get_error(at) for at in range(parser.num_errors)]
        reasons = "; ".join(f"{error.node_name()}: {error.desc()}" for error in errors)
        raise PlanFault(f"{lib.product} cannot read the graph: {reasons}")
    config = builder.create_builder_config()
    if lib.product == RTX:
        _target(trt, config, sm)
    else:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, _WORKSPACE_BYTES)
    for profile in profiles:
        _add(builder, config, profile, spec)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise PlanFault(f"{lib.product} cannot build the plan: {lib.why()}")
    return bytes(plan)


def _target(trt: Any, config: Any, sm: str) -> None:
    word = f"SM{sm.replace('.', '')}"
    capability = getattr(trt.ComputeCapability, word, None)
    if capability is None:
        raise PlanFault(f"{RTX} {trt.__version__} builds nothing for {word}")
    config.num_compute_capabilities = 1
    if not config.set_compute_capability(capability, 0):
        raise PlanFault(f"{RTX} refuses {word}")


def _add(builder: Any, config: Any, profile: Profile, spec: InputSpec) -> None:
    most = input_layout(Bucket(profile.users, profile.tiles), spec)
    least = input_layout(Bucket(1, profile.tiles), spec)
    found = builder.create_optimization_profile()
    for name, (shape, _) in most.items():
        found.set_shape(name, least[name][0], shape, shape)
    if config.add_optimization_profile(found) < 0:
        raise PlanFault(f"the profile of {profile.tiles} tiles is refused")
