"""Randomness: where noise and lots come from."""

from __future__ import annotations

import hashlib
import math
import secrets

import numpy as np
import torch
from torch import Tensor

from adadp.errors import ConfigurationError
from adadp.gradients.arithmetic import accumulation_dtype


class Randomness:
    """Gaussian and uniform draws.

    By default PyTorch's generator, started from 256 bits of the system's entropy (63 on a GPU, whose generator takes no
    more): fast, and unpredictable to whoever does not see its output un-noised, but not a cryptographic generator.
    `secure=True` takes every bit from the system's cryptographic source instead (slower). A `seed` is for tests and
    papers: whoever knows it can take the noise off.
    """

    def __init__(self, seed: int | None = None, *, secure: bool = False) -> None:
        self.seeded = seed is not None
        self.secure = secure and seed is None
        self._seed = secrets.randbits(256) if seed is None else seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._renewed = 0

    @property
    def assumption(self) -> str:
        """What the guarantee takes for granted about these draws."""
        if self.seeded:
            return "noise and lots come from a given seed, which stays secret and is used for this run only"
        if self.secure:
            return "noise and lots come from the operating system's cryptographic randomness"
        return (
            "noise and lots come from PyTorch's generator, started from system entropy; it is not a "
            "cryptographic generator (secure_mode=True uses one)"
        )

    def generator(self, device: torch.device) -> torch.Generator:
        """The one that draws on `device`, unless every draw is `secure`."""
        if device not in self._generators:
            self._generators[device] = _started(device, f"{self._seed} {device.type} {device.index or 0}")
        return self._generators[device]

    def renew(self, device: torch.device) -> None:
        """Draw from a new stream after a recording that failed, which leaves its generator unusable.

        Not from where that one stands: another recording may hold it still, and would draw the same noise for its lots.
        """
        self._renewed += 1
        name = f"{self._seed} {device.type} {device.index or 0} renewed {self._renewed}"
        self._generators[device] = _started(device, name)

    def normal(self, like: Tensor) -> Tensor:
        """Independent standard normal values of `like`'s shape and device, in float32 or better."""
        if self.secure:
            return _normal_from(secrets.token_bytes, like.numel()).to(like.device).view(like.shape)
        dtype = accumulation_dtype(like.dtype)
        return torch.empty(like.shape, dtype=dtype, device=like.device).normal_(generator=self.generator(like.device))

    def uniform(self, count: int) -> Tensor:
        """Independent uniform values in [0, 1), float64, on the CPU."""
        if self.secure:
            return torch.from_numpy(_uniform_from(secrets.token_bytes, count))
        return torch.empty(count, dtype=torch.float64).uniform_(generator=self.generator(torch.device("cpu")))

    def permutation(self, count: int) -> Tensor:
        """A uniformly random order of 0..count-1."""
        return self.uniform(count).argsort()


_CPU_STATE_BYTES = 5056  # PyTorch's Mersenne Twister: three words, 624 words of state, what is left of normal draws
_CPU_WORDS = slice(3, 3 + 624)


def _started(device: torch.device, name: str) -> torch.Generator:
    """A generator whose whole state follows from `name`; different names and devices share no stream.

    On a CPU `manual_seed` uses the last 32 bits of its argument only. So few can be tried one by one until the noise
    comes off, so the Twister's state is filled here.
    """
    stream = hashlib.shake_256(name.encode()).digest(8 + 4 * 624)
    generator = torch.Generator(device)
    generator.manual_seed(int.from_bytes(stream[:8], "little") >> 1)
    if device.type == "cpu":
        state = generator.get_state()
        if len(state) != _CPU_STATE_BYTES:
            raise ConfigurationError(
                "the state of this PyTorch's generator is not laid out as known, so it cannot be started from enough "
                "entropy: use secure_mode=True"
            )
        words = np.frombuffer(stream[8:], dtype=np.uint32).astype(np.int64)
        state.view(torch.int64)[_CPU_WORDS] = torch.from_numpy(words)
        generator.set_state(state)
    return generator


def _uniform_from(source: object, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    words = np.frombuffer(source(8 * count), dtype=np.uint64)  # type: ignore[operator]
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _normal_from(source: object, count: int) -> Tensor:
    """Box-Muller in float64, with 1 - u so that the logarithm never sees zero."""
    half = (count + 1) // 2
    radius = np.sqrt(-2 * np.log1p(-_uniform_from(source, half)))
    angle = 2 * math.pi * _uniform_from(source, half)
    values = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
    return torch.from_numpy(values)
