"""How a launch is chosen: device traits, legal tiles, and decision trees kept as data."""
