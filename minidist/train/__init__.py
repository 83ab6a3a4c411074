"""Training: configuration, step, loop, optimizer, schedule, metrics, evaluation, generation."""
