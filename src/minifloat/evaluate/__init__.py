"""Is it still the same model (`compare`), and what was gained (`bench`); the one report of both."""
