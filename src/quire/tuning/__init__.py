"""How a launch is chosen: device properties, legal tiles, and decision trees kept as data."""
