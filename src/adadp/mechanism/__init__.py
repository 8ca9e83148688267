"""One private step: a lot's life, the bounded sum, the noise, and the optimizer that receives the result."""
