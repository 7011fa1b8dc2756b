"""Load, replay and benchmarks against a running service."""
