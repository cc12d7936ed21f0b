"""Dialogs in the text of a model: thinking, tool calls and answers, whatever API a client speaks."""
