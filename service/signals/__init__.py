"""Fresh signals of users in Redis: read within a budget, written once, forgotten on request."""
