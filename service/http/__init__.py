"""HTTP: bytes in, bytes out, and the one table from errors to statuses."""
