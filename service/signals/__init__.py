"""Fresh signals and profiles in Redis."""
