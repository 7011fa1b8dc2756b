"""Metrics, spans and logs of finished requests."""
