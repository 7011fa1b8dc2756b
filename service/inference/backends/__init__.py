"""One module an engine; each alone imports its library."""
