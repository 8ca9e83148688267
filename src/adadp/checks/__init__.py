"""Checks that a model, a collate function, a loss and a loop keep examples apart, as a bound on one gradient requires.

A *trial* runs the user's code on a few rows of a batch that differ much from each other: as they are, with some rows
replaced, with one left out, and with one item made longer. For the rows that stay, the output of every layer and the
norm of every example's gradient must be what they were; attributes of modules may not depend on examples. Then half of
the whole batch is replaced. Synthetic rows, or the user's public examples, come before private ones. Trials take place
on lots 0, 1, 10, 100, 1000, ..., the last planned lot, and when a module changes its mode. What lets examples reach
each other is refused with an error; what cannot be run again (the loop's own code) is noted in `Trial.untried`, which
the guarantee prints. A trial that passes proves nothing.

- before training: `validation` (layers, optimizer, `fix`), `dataset_records`, `assumptions` (texts)
- every step: `weights` (what is trained is what was made private)
- trials: `trial` (called by the engine), `schedule` (when), `inputs` (what the loop made of the batch)
- one trial: `cascade` (the order of checks), `short_trial`, `module_trial`, `loss_trial`, `whole_batch`, `padding`,
  `collate`, `criterion`, `known_losses` (losses [n] of the loop)
- how they work: `containers` (arguments and their rows), `dataset_items`, `trial_rows` (which rows, and what replaces
  them), `public_examples`, `trial_runs`, `seeds`, `module_state`, `result_comparison`,
  `gradient_norms`
"""

from adadp.checks.trial import Trial

__all__ = ["Trial"]
