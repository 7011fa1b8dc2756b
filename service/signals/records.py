"""Raw replies -> user states, and how many records of foreign producers did not decode. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from service.domain import EMPTY_PROFILE, Profile, Signal

_signals = msgspec.json.Decoder(tuple[Signal, ...])
_signal = msgspec.json.Decoder(Signal)
_profile = msgspec.json.Decoder(Profile)
encode_signal = msgspec.json.Encoder().encode


class Records(NamedTuple):
    """One user's list, decoded."""

    signals: tuple[Signal, ...]
    json_array: bytes
    """The decodable records, for `decode_array`."""
    skipped: int


def decode_records(records: Sequence[bytes]) -> Records:
    """Decode a list of JSON records at once; one by one, skipping, if any of them is bad."""
    if not records:
        return Records((), b"", 0)
    json_array = b"[%b]" % b",".join(records)
    try:
        signals = _signals.decode(json_array)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _decode_each(records)
    return Records(signals, json_array, 0)


def decode_array(json_array: bytes) -> tuple[Signal, ...]:
    """Signals of a `Records.json_array`."""
    return _signals.decode(json_array) if json_array else ()


def decode_profile(raw: bytes | None) -> Profile | None:
    """The profile; EMPTY_PROFILE if there is none, None if it is not a profile."""
    if not raw:
        return EMPTY_PROFILE
    try:
        return _profile.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _decode_each(records: Sequence[bytes]) -> Records:
    signals, good = [], []
    for record in records:
        try:
            signals.append(_signal.decode(record))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        good.append(record)
    json_array = b"[%b]" % b",".join(good) if good else b""
    return Records(tuple(signals), json_array, len(records) - len(good))
