"""Which examples a step sees: sampling schemes, lots, and the loader that hands lots to the user's loop."""
