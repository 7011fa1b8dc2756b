"""One request's straight line, and the pure parts that it is made of."""
