"""The fixtures of `hub_fixtures`."""

from hub_fixtures import home, hub, sharded  # noqa: F401
