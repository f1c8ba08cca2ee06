"""Floor 6.5: trainings that are killed, stopped and damaged on purpose, in real processes."""
