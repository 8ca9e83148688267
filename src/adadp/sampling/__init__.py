"""Which examples a step sees: sampling schemes, a lot's states, and the loader that hands lots to the user's loop."""
