"""Driving load: clients, the open-loop generator, faults and processes. Judges nothing."""
