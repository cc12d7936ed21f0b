"""Reports of a comparison: an HTML page, a section of the model card, and the sentences and numbers of both."""
