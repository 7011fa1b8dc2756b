"""`python -m models`: from a click log to a bundle that serves."""

import sys

NEEDS = "python -m models needs more: .venv/bin/pip install --constraint lock.txt -e '.[cpu,train]'"


def main() -> int:
    """Run a command, or say what must be installed for it."""
    try:
        from models.cli import main as run  # noqa: PLC0415  an extra
    except ModuleNotFoundError as error:
        print(f"{error}; {NEEDS}", file=sys.stderr)
        return 2
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
