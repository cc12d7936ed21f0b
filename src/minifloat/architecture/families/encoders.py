"""Encoders without a causal mask."""

from __future__ import annotations

from minifloat.architecture.family import Family

FAMILIES: tuple[Family, ...] = ()
