"""Ways in: each module parses, builds and calls."""
