"""The forms that one parameter's per-example gradients may have: dense, products, rows, low rank, half precision."""
