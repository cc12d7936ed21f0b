"""The command line: one module per command. `main` registers them, `options` holds what several share."""
