"""The offline path: from a click log to a bundle that serves."""
