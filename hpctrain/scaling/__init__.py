"""Floor 7: how a training scales, why, and how many nodes to ask for."""
