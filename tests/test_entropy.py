"""What tests draw from the system follows from their names."""

from __future__ import annotations

import multiprocessing
import os
import secrets

import entropy
import pytest
import torch

from adadp.randomness import Randomness


def drawn() -> tuple[object, ...]:
    noise = Randomness().normal(torch.zeros(3)).tolist()
    return (
        os.urandom(4),
        secrets.token_hex(4),
        secrets.randbits(62),
        secrets.randbelow(99),
        noise,
        torch.rand(2).tolist(),
    )


def test_a_name_determines_all_draws_and_another_gives_others() -> None:
    found = []
    for name in ("one", "one", "two"):
        with entropy.aside(name):
            found.append([drawn(), drawn()])
    assert found[0] == found[1]
    for mine, other in ((found[0][0], found[0][1]), (found[0][0], found[2][0])):
        assert not any(one == two for one, two in zip(mine, other, strict=True) if one != mine[3])


def test_what_was_drawn_aside_changes_nothing_afterwards() -> None:
    def go_on(look_aside: bool) -> tuple[object, ...]:
        with entropy.aside("test"):
            if look_aside:
                with entropy.aside("other"):
                    drawn()
            return drawn()

    assert go_on(True) == go_on(False)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="processes are not forked here")
def test_forked_processes_do_not_draw_alike() -> None:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    children = [context.Process(target=lambda: queue.put(os.urandom(16))) for _ in range(2)]
    for child in children:
        child.start()
    found = {queue.get(), queue.get(), os.urandom(16)}
    for child in children:
        child.join()
    assert len(found) == 3


def test_one_draw_is_the_same_in_each_run(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("draws") == 0:
        assert os.urandom(4).hex() == "0d52badf"
