"""The APIs of the server, one file each: its requests, their translation into the internal form, and its answers."""
