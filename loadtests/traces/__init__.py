"""Traces: their format, where they come from, and how they are reshaped. Sends nothing."""
