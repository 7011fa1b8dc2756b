"""The commands of `python -m loadtests`, one module each: arguments in, exit code out."""
