"""Where Quire meets what people already run: one module per front door, built on Quire's public names alone."""
