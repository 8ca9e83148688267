"""A run of several processes that was interrupted goes on from its checkpoint, and every lot is charged."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from adadp import PrivacyEngine
from adadp.accounting.ledger import Ledger
from adadp.randomness import Randomness
from distributed.team import values
from distributed.work import LOT, cross_entropy, data, mlp


def part(
    rank: int, size: int, folder: str, seed: int | None, resume: bool, lots: int
) -> tuple[Tensor, int, float | None, list[Tensor]]:
    """Make `lots` lots, from the checkpoint if there is to be one, and save one after the fourth; do not close."""
    model: nn.Module = DistributedDataParallel(mlp())
    path = f"{folder}/checkpoint"
    engine = PrivacyEngine(seed=seed, ledger=f"{folder}/ledger.jsonl", dataset="made", resume=path if resume else None)
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        data_loader=DataLoader(data(), batch_size=LOT),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    first = loader.lots.next
    released: list[Tensor] = []
    while len(released) < lots:
        for inputs, targets, _ in loader:
            optimizer.zero_grad()
            optimizer.backward(cross_entropy(private, inputs, targets))
            optimizer.step()
            released.append(model.module[0].weight.grad.clone())
            if len(released) == 4 and not resume:
                engine.save_checkpoint(path, module=model.module)
            if len(released) == lots:
                break
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return weights, first, engine.guarantee(1e-5).epsilon, released


def key_of(rank: int, size: int, folder: str) -> bytes:
    """The key that the processes share, after some lots and a checkpoint."""
    seen: list[bytes] = []
    sound = Randomness.sharing

    def sharing(self: Randomness, key: bytes) -> Randomness:
        seen.append(key)
        return sound(self, key)

    Randomness.sharing = sharing  # type: ignore[method-assign]
    part(rank, size, folder, None, False, 6)
    return seen[0]


def test_the_key_of_lots_and_noise_is_in_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    keys = values(2, tmp_path, key_of, str(folder))
    assert keys[0] == keys[1]
    assert len(keys[0]) == 32
    files = [file.read_bytes() for file in folder.iterdir()]
    assert len(files) > 1
    for shown in (keys[0], keys[0].hex().encode(), base64.b64encode(keys[0])[:-1], str(list(keys[0])).encode()):
        assert not any(shown in content for content in files)


@pytest.mark.parametrize("seed", [None, 8])
def test_a_run_goes_on_and_pays_for_what_it_repeats(tmp_path: Path, seed: int | None) -> None:
    before = values(2, tmp_path, part, str(tmp_path), seed, False, 6)
    assert [found[1] for found in before] == [0, 0]
    after = values(2, tmp_path, part, str(tmp_path), seed, True, 5)
    assert [found[1] for found in after] == [4, 4]
    assert torch.equal(after[0][0], after[1][0])
    assert after[0][2] == after[1][2]
    # Lots 4 and 5 were made before the interruption, and again: other lots with other noise, and charged.
    assert not torch.equal(after[0][3][0], before[0][3][4])
    charged = sum(count for _, count in Ledger(tmp_path / "ledger.jsonl").charged())
    assert charged >= 6 + 5
    assert after[0][2] > before[0][2]
