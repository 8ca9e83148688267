"""What a module, a loss, a dataset and a loop must not do, and trials of it."""
