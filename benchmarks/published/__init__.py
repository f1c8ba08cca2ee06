"""Published scaling curves, and the inputs to predict them from, each with its source."""
