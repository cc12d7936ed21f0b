"""The names that `minifloat.serve.server` exports."""

from __future__ import annotations

import minifloat.serve.server


def test_every_exported_name_resolves() -> None:
    for name in minifloat.serve.server.__all__:
        assert getattr(minifloat.serve.server, name) is not None
