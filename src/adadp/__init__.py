"""Differentially private training for PyTorch, with guarantees that are true."""
