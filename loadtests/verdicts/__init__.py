"""Verdicts: what a run, or two, showed, as numbers, text and pages. Sends nothing."""
