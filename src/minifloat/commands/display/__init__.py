"""What the commands print on a terminal, with rich; imported by a command when it runs."""
