"""What the commands print on a terminal: one module per command. Imports rich, so commands import it when they run."""
