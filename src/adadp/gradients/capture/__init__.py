"""Hooks that see what each layer received and what came back to it, in one ordinary backward pass."""
