"""Reports and model cards: HTML pages, SVG charts, Markdown sections, and the text and progress that they show."""
