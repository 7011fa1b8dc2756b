"""The command line of the load tester: `python -m loadtests <command>`.

Exit codes: 0 pass, 1 fail, 2 wrong arguments or input, 3 a run that proves nothing,
4 undecided, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from loadtests.driving.faults import ScheduleFault
from loadtests.driving.processes import StartFault
from loadtests.driving.samples import RunFault
from loadtests.traces.trace import TraceFault

_COMMANDS = {
    "record": ("record", "serve an app with a tap that writes a trace"),
    "import": ("importing", "make a trace of nginx, GoReplay, HAR or Mooncake files"),
    "synth": ("synth", "make a trace from counts, stamps or a model"),
    "shape": ("shape", "window, speed, rate and loops of a trace"),
    "replay": ("replay", "replay a trace open loop, and judge"),
    "report": ("report", "judge a run again and write its page"),
    "curve": ("curve", "throughput against latency, and the knee"),
    "compare": ("compare", "two servers, or two runs, by the ratio of their p99"),
    "cost": ("cost", "replicas and money for a trace, from curves and a price list"),
    "bench": ("bench", "capacity of this service on one core, against its bare engine"),
    "backends": ("backends", "every engine of this host, on one model"),
    "real-days": ("real_days", "the test days of a click log, live, against offline figures"),
    "swaps": ("swaps", "many swaps of this service under a steady load, judged"),
    "rehearse": ("rehearse", "an hour of traffic in minutes, with swaps and a Redis stall"),
    "demo": ("demo", "three visitors of the shipped shop, and how their slates move"),
    "workers": ("workers", "several processes of this service under one load: how many it takes"),
    "telemetry": ("telemetry", "CPU that metrics and tracing cost a request"),
    "peers": ("peers", "the same model behind other servers, beside this one"),
    "trivial": ("trivial", "a server that does nothing, to measure the generator"),
}


def main() -> int:
    """Run one command; its exit code is the verdict."""
    parser = argparse.ArgumentParser(prog="python -m loadtests", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    # only the module of the named command is loaded: bench needs what the others do not
    named = next((word for word in sys.argv[1:] if word in _COMMANDS), None)
    for name, (module_name, summary) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name == named:
            module = import_module(f"loadtests.commands.{module_name}")
            command.description = module.__doc__
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    args = parser.parse_args()
    try:
        return int(args.run(args))
    except (TraceFault, ScheduleFault, RunFault, StartFault) as fault:
        print(f"{args.command}: {fault}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
