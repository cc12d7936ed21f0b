"""A comparison as a page, as a section of the model card, and as the words and numbers that both share."""
