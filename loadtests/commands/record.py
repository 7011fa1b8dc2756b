"""Serve an ASGI app with a tap that writes the traffic into a trace, ids pseudonymised."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import uvicorn
from uvicorn.importer import import_from_string

from loadtests.traces.tap import Pseudonyms, Tap
from loadtests.traces.trace import TraceFault


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("app", help="module:attribute of the ASGI app")
    parser.add_argument("out", type=Path)
    parser.add_argument("--factory", action="store_true", help="the attribute makes the app")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--share", type=float, default=1.0, help="share of the users")
    parser.add_argument("--keep-items", action="store_true", help="item ids as they are")
    parser.add_argument(
        "--key-env", default="LOADTESTS_KEY", help="variable with the key of the pseudonyms"
    )


def run(args: argparse.Namespace) -> int:
    try:
        key = os.environ[args.key_env].encode()
        pseudonyms = Pseudonyms(key, keep_items=args.keep_items)
    except KeyError as error:
        raise TraceFault(f"{args.key_env} is not set: it holds the pseudonyms' key") from error
    except ValueError as error:
        raise TraceFault(f"{args.key_env}: {error}") from error
    app = import_from_string(args.app)
    tap = Tap(app() if args.factory else app, out=args.out, pseudonyms=pseudonyms, share=args.share)
    try:
        uvicorn.run(tap, host=args.host, port=args.port, access_log=False)
    finally:
        tap.close()
    print(f"{args.out}: {tap.recorded} lines, {tap.dropped} dropped")
    return 0
