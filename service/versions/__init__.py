"""Model versions: where they lie, which are loaded, how one replaces another."""
