"""One private step: from gradients over sums and noise to the optimizer; its recording and replay; observation."""
