"""The command line of the load tester: `python -m loadtests <command>`."""

from __future__ import annotations

import argparse
import sys

from loadtests import bench, bench_backend, trivial

_COMMANDS = {
    "bench": (bench, "capacity and CPU a request of the service, against its bare engine"),
    "backends": (bench_backend, "every engine of this host, on one model"),
    "trivial": (trivial, "a server that does nothing, to measure the generator"),
}


def main() -> int:
    """Run one command; its exit code is the verdict."""
    parser = argparse.ArgumentParser(prog="python -m loadtests", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, summary) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args()
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
