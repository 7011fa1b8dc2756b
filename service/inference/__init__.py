"""Batches, the device thread, and the engines."""
