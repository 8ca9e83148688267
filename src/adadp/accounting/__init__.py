"""What was released, what it costs, and what may be said about it."""
