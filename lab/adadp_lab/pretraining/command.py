"""`adadp pretrain`: features from public data, kept in the user's cache."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer


def pretrain(
    net: Annotated[str, typer.Argument(help="paper, resnet or wide.")] = "paper",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets lie.", show_default=False)] = None,
    hold_out: Annotated[
        float, typer.Option(help="Set this part of CIFAR-100 aside, print the accuracy on it, and keep no weights.")
    ] = 0.0,
) -> None:
    """Train the convolutions of a net on CIFAR-100, which counts as public, without privacy."""
    from adadp.training.planning import device_of
    from adadp_lab import pretraining

    started = time.perf_counter()

    def tell(epoch: int, loss: float) -> None:
        typer.echo(f"epoch {epoch}: loss {loss:.3f} after {time.perf_counter() - started:.0f} s", err=True)

    found = pretraining.pretrain(net, data_dir=data_dir, device=device_of(device), hold_out=hold_out, progress=tell)
    if found.accuracy is not None:
        typer.echo(f"accuracy on {hold_out:g} of CIFAR-100, held out: {100 * found.accuracy:.2f}%; no weights are kept")
        return
    typer.echo(f"{found.path}\nWhatever rests on these weights assumes: {found.assumption}.")
