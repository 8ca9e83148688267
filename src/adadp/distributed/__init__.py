"""One private step made by several processes (torch.distributed): their parts of a lot, and what they agree on."""
