"""Settings from the environment, prefix `RANKER_`. Read by `app` and `__main__` alone.

An unknown or bad variable stops the start, and all faults are listed together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from service.domain import BackendChoice, PrecisionChoice
from service.errors import RankerError

PREFIX = "RANKER_"
_SHIPPED_STORE = str(Path(__file__).resolve().parent.parent / "models" / "store")


class SettingsFault(RankerError):
    """The environment does not make a valid configuration; one line a fault."""


class Settings(BaseModel):
    """Everything an operator may set; what belongs to a model is in its manifest."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65_535, description="port to listen on; 0 picks a free one")
    redis_url: SecretStr | None = Field(
        None,
        description="redis://, rediss://, unix://, redis+sentinel://, redis+cluster://; "
        "an embedded Valkey is started if absent",
    )
    store: str = Field(
        _SHIPPED_STORE,
        description="folder of bundles, `<name>/<version>/`, or a URL that fsspec reads",
    )
    store_copies: Path = Field(
        Path("/var/tmp/ranker-bundles"),  # noqa: S108  verified against digests when loaded
        description="where bundles of a store's URL are copied to",
    )
    model: str = Field("shop", description="name of the model to serve")
    version: str | None = Field(
        None, description="version to serve while the fleet wishes none; the newest if absent"
    )
    admin_token: SecretStr | None = Field(
        None, min_length=16, description="bearer token of the admin routes; off if absent"
    )
    replica: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,199}$",
        description="this replica's name in the fleet; host, port and process if absent",
    )
    signing_key: Path | None = Field(
        None,
        description="public key (PEM) that must have signed a manifest; none need be if absent",
    )
    fleet_folder: Path | None = Field(
        None, description="shared folder of the fleet's wished state; Redis if absent"
    )
    fleet_poll_ms: int = Field(250, ge=20, description="how often to look at the wished state")
    swap_policy: Literal["availability-preserving", "resource-preserving"] = Field(
        "availability-preserving",
        description="a version that does not fit beside the others is refused; with "
        "resource-preserving it takes their place",
    )
    previous_hot_ms: int = Field(
        600_000, ge=0, description="how long the previous version stays loaded after a swap"
    )
    items_file: Path | None = Field(
        None, description="item table that replaces the bundle's, read again when it changes"
    )
    items_poll_ms: int = Field(2_000, ge=50, description="how often to look at items_file")
    max_items: int = Field(1_000, ge=1, le=100_000, description="most items of a slate")
    max_body_bytes: int = Field(1 << 20, ge=1_024, description="largest request body")
    timeout_ms: float = Field(100, gt=2, le=60_000, description="deadline if a request names none")
    signals_budget_ms: float = Field(10, gt=0, description="most time to wait for signals")
    signals_keep: int = Field(50, ge=1, le=1_000, description="signals kept a user")
    signals_ttl_days: float = Field(
        30, ge=0.001, le=36_500, description="when an idle user's signals expire"
    )
    signals_local_mb: float = Field(64, ge=0, description="memory for last-known signals")
    redis_timeout_ms: float = Field(250, gt=0, description="socket time-out of the signal store")
    redis_connections: int = Field(8, ge=6, description="most connections to the signal store")
    backend: BackendChoice = Field(
        "auto",
        description="engine to prefer: tensorrt, onnx-cuda, openvino or onnx-cpu; "
        "the best ones of this host if auto",
    )
    precision: PrecisionChoice = Field(
        "auto",
        description="precision of the graphs to serve: fp32, fp16, int8 or fp8; "
        "the best one of each engine if auto",
    )
    plans: Path | None = Field(
        None, description="private folder for TensorRT's engine plans; no TensorRT if absent"
    )
    stall_ms: float = Field(
        50, gt=0, description="least time after which a batch counts as hanging"
    )
    lost_grace_ms: float = Field(
        5_000, ge=0, description="from a lost device to a failing liveness probe"
    )
    engine_threads: int | None = Field(
        None,
        ge=1,
        description="threads inside one engine run; if absent, what was tuned for this CPU, or 1",
    )
    max_queue_ms: float = Field(50, gt=0, description="most predicted time in the batch queue")
    max_in_flight: int = Field(
        1_024, ge=1, description="most requests in flight; fewer while the loop is behind"
    )
    drain_ms: float = Field(0, ge=0, description="from readiness off to listener closed")
    api_keys: tuple[SecretStr, ...] = Field(
        (), description="comma-separated keys of the data routes; open if none"
    )
    quota_rps: float | None = Field(None, gt=0, description="requests a second for each API key")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least level that is logged: debug, info, warning or error"
    )
    access_log: bool = Field(default=False, description="a log line for every request")
    slow_ms: float = Field(50, gt=0, description="a request that takes longer is slow")
    notable_rps: float = Field(
        20,
        gt=0,
        description="most slow, degraded and failed requests a second that are "
        "traced and logged each for itself",
    )
    tracing: Literal["off", "otel", "datadog"] = Field(
        "off", description="provider of spans: off, otel or datadog"
    )
    trace_sample: float = Field(
        0.01, ge=0, le=1, description="share of requests traced where the caller did not decide"
    )
    otlp_url: str = Field("http://127.0.0.1:4318", description="OTLP over HTTP, if tracing=otel")
    agent_url: str = Field(
        "http://127.0.0.1:8126", description="Datadog agent's trace port, if tracing=datadog"
    )
    dogstatsd_url: str | None = Field(
        None,
        pattern=r"^(udp://.+:\d+|unix:///.+)$",
        description="udp://host:port or unix:///path of a DogStatsD agent, which gets "
        "latencies as distributions; none if absent",
    )
    service: str = Field("ranker", description="the tag `service` of spans and logs")
    env: str = Field("dev", description="the tag `env` of spans and logs")


def _words(fault: ErrorDetails) -> str:
    """Pydantic's words, or plainer ones."""
    match fault["type"]:
        case "extra_forbidden":
            return "no such setting"
        case "too_short":
            return f"at least {fault['ctx']['min_length']} characters are needed"
    return fault["msg"]


def load(
    environment: Mapping[str, str] = os.environ,
    *,
    checks: Mapping[str, Callable[[str], object]] = MappingProxyType({}),
) -> Settings:
    """Settings of an environment; raises SettingsFault with every fault, one a line.

    `checks` names settings that another part understands better; they raise ValueError.
    """
    given: dict[str, object] = {
        key.removeprefix(PREFIX).lower(): value
        for key, value in environment.items()
        if key.startswith(PREFIX)
    }
    if isinstance(keys := given.get("api_keys"), str):
        given["api_keys"] = tuple(key.strip() for key in keys.split(",") if key.strip())
    lines = []
    for name, check in checks.items():
        try:
            if name in given:
                check(str(given[name]))
        except ValueError as error:
            lines.append(f"{PREFIX}{name.upper()}: {error}")
    try:
        settings = Settings(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        lines += [
            f"{PREFIX}{str(fault['loc'][0]).upper()}: {_words(fault)}" for fault in error.errors()
        ]
    if lines:
        raise SettingsFault("\n".join(sorted(lines)))
    return settings


def table() -> str:
    """The settings as the README's Markdown table: `python -m service.settings`."""
    lines = ["| variable | default | meaning |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        shown = "" if field.default in {None, ()} else field.default
        if name == "store":
            shown = "models/store"
        lines.append(f"| `{PREFIX}{name.upper()}` | {shown} | {field.description} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())  # noqa: T201
