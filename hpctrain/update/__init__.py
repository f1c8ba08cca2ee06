"""Floor 3: how weights are updated when the ranks of a node share the work."""
