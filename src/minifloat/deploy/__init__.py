"""Before and around an engine: will it load (`check`), what does it take (`estimate`), the machine, and the hub."""
