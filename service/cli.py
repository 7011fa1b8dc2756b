"""`python -m service models …`: look at the fleet and change what it serves, over HTTP."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, get_args
from urllib.parse import quote, urlsplit

from service.domain import BackendChoice

_TOKEN = "RANKER_ADMIN_TOKEN"  # noqa: S105  the variable's name
_LOOK_S = 0.2


class CallFault(Exception):
    """The service did not do what was asked, and says why."""


class Service:
    """One replica's HTTP interface."""

    def __init__(self, url: str, *, token: str | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise CallFault(f"{url!r} is not an http or https URL")
        self._parts = parts
        self._token = token

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """A JSON answer; raises CallFault for anything but a 2xx."""
        kind = HTTPSConnection if self._parts.scheme == "https" else HTTPConnection
        headers = {"content-type": "application/json"}
        if self._token and body is not None:
            headers["authorization"] = f"Bearer {self._token}"
        connection = kind(self._parts.netloc, timeout=30)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, self._parts.path.rstrip("/") + path, content, headers)
            answer = connection.getresponse()
            shown: dict[str, Any] = json.loads(answer.read())
        except (OSError, HTTPException, ValueError) as error:
            raise CallFault(f"{self._parts.netloc}: {error}") from error
        finally:
            connection.close()
        if answer.status >= 300:
            raise CallFault(f"{answer.status}: {shown.get('detail', shown)}")
        return shown


def run(words: Sequence[str]) -> int:
    """Run one command; 1 says that it was refused or did not happen in time."""
    args = _parser().parse_args(words)
    try:
        service = Service(args.url, token=args.token or os.environ.get(_TOKEN))
        if args.act == "list":
            show(service.call("GET", "/v1/models"), print)
            return 0
        page = service.call("GET", "/v1/models")
        name = args.model or page["model"]
        wish = service.call("POST", f"/v1/models/{quote(name, safe='')}/{args.act}", _order(args))
        print(f"generation {wish['generation']}: {_wished(wish)}")
        if args.wait:
            wait(service, wish["generation"], timeout_s=args.timeout_s)
    except CallFault as fault:
        print(f"{args.act}: {fault}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m service", description="Without a command: serve, as RANKER_* variables say."
    )
    models = parser.add_subparsers(dest="group", required=True).add_parser(
        "models", help="look at the versions of a running service, and change them"
    )
    acts = models.add_subparsers(dest="act", required=True)
    for act, summary in (
        ("list", "what is served, by whom, and what lies in the store"),
        ("load", "load a version everywhere and let it wait"),
        ("promote", "make a version the one that answers"),
        ("canary", "give a version a share of users, watched by gates"),
        ("shadow", "score copies of requests with a version, unseen"),
        ("rollback", "end the canary, or go back to the previous version"),
        ("backend", "try one engine first, or the best one again; the others stay warm behind it"),
    ):
        command = acts.add_parser(act, help=summary, description=summary)
        command.add_argument("--url", default="http://127.0.0.1:8000", help="any replica")
        command.add_argument("--token", help=f"admin token; {_TOKEN} if absent")
        command.set_defaults(version=None)
        if act == "list":
            continue
        command.add_argument("--model", help="its name; the one that is served if absent")
        command.add_argument("--wait", action="store_true", help="until every replica has it")
        command.add_argument("--timeout-s", type=float, default=120)
        if act == "promote":
            command.add_argument("version")
        elif act == "backend":
            command.add_argument("backend", choices=get_args(BackendChoice))
        elif act != "rollback":
            command.add_argument("version", nargs="?", help="ends the present one if absent")
        if act in {"canary", "shadow"}:
            command.add_argument("--percent", type=float)
        if act == "canary":
            command.add_argument("--steps", help="ramp, such as 1,5,25,50, in place of --percent")
            command.add_argument("--step-s", type=float, help="least time at each step")
            command.add_argument("--promote", action="store_true", help="after the last step")
    return parser


def _order(args: argparse.Namespace) -> dict[str, Any]:
    order: dict[str, Any] = {"version": args.version, "by": getpass.getuser()}
    if args.act == "backend":
        order["backend"] = args.backend
    if getattr(args, "percent", None) is not None:
        order["percent"] = args.percent
    if args.act == "canary":
        order["promote"] = args.promote
        if args.steps:
            order["steps"] = [float(word) for word in args.steps.split(",")]
        if args.step_s:
            order["step_ms"] = round(args.step_s * 1e3)
    return order


def _wished(wish: dict[str, Any]) -> str:
    words = [f"primary {wish['primary']}"]
    if canary := wish["canary"]:
        words.append(f"canary {canary['version']} at {canary['steps'][canary['step']]:g}%")
    if shadow := wish["shadow"]:
        words.append(f"shadow {shadow['version']} at {shadow['percent']:g}%")
    if wish["backend"]:
        words.append(f"{wish['backend']} first")
    if wish["standby"]:
        words.append(f"standby {wish['standby']}")
    return ", ".join(words)


def show(page: dict[str, Any], say: Callable[[str], None]) -> None:
    """The models page, for a person."""
    wish = page["wish"]
    say(f"wished    generation {wish['generation']}: {_wished(wish)}")
    if wish["act"]:
        say(f"          by {wish['act']} of {wish['by'] or 'unknown'}: {wish['reason']}")
    if page["fleet_fault"]:
        say(f"fleet     cannot be seen: {page['fleet_fault']}")
    for replica in page["replicas"]:
        roles = ", ".join(f"{role} {version}" for role, version in replica["roles"].items())
        reason = f" ({replica['reason']})" if replica["reason"] else ""
        say(f"replica   {replica['replica']}: {replica['state']}{reason}; {roles or 'nothing'}")
    for version, rungs in page["rungs"].items():
        shown = [
            f"{rung['backend']} {rung['precision']} {'serves' if rung['serves'] else rung['state']}"
            for rung in rungs
        ]
        say(f"rungs     {version}: {', '.join(shown)}")
    if canary := page.get("canary"):
        say(f"canary    {canary['fate']}: {canary['reason']}; {json.dumps(canary['numbers'])}")
    if shadow := page.get("shadow"):
        say(f"shadow    {json.dumps(shadow)}")
    for name, versions in page["store"].items():
        say(f"store     {name}: {', '.join(versions)}")


def wait(service: Service, generation: int, *, timeout_s: float) -> None:
    """Return once every replica runs the wish; raises CallFault if one refuses or time is up."""
    started = time.monotonic()
    line = ""
    while time.monotonic() - started < timeout_s:
        page = service.call("GET", "/v1/models")
        if page["wish"]["generation"] > generation:
            raise CallFault(f"overtaken by generation {page['wish']['generation']}")
        replicas = [one for one in page["replicas"] if one["state"] != "silent"]
        done = [one for one in replicas if one["state"] == "converged"]
        refused = [one for one in replicas if one["state"] == "refused"]
        line = f"{len(done)} of {len(replicas)} replicas, {time.monotonic() - started:.1f} s"
        print(f"\r{line}", end="", file=sys.stderr, flush=True)
        if refused:
            print(file=sys.stderr)
            raise CallFault(f"{refused[0]['replica']} refuses: {refused[0]['reason']}")
        if replicas and len(done) == len(replicas):
            print(file=sys.stderr)
            return
        time.sleep(_LOOK_S)
    print(file=sys.stderr)
    raise CallFault(f"not everywhere within {timeout_s:g} s: {line}")
