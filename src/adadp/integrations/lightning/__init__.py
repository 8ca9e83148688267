"""Private training with Lightning: one callback, and the rest of the program stays as it is.

from adadp.integrations.lightning import Private

private = Private(target_epsilon=1, target_delta=1e-5)
L.Trainer(max_epochs=20, callbacks=[private]).fit(module, data)
print(private.guarantee)
"""

from __future__ import annotations

from adadp.integrations.lightning.callback import Private

__all__ = ["Private"]
