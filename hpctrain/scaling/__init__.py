"""Floor 7: how a model scales: sweeps, reports, and the prediction for machines not there yet."""
