"""The terminal output of the commands: one module per command. Imports rich, so commands import it when they run."""
