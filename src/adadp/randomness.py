"""Random numbers for noise and for drawing lots.

A stream belongs to one run in one process. It is started at its first use, so that an engine that was made before a
fork has a stream of its own in each child. A copy never continues the stream that it was copied from.

With a seed, which examples are in a lot and its noise follow from the run, the lot's number and the attempt at it
(`lot_stream`, `begin_lot`), and not from what was drawn before: a run that is resumed, or shared by several processes,
draws the same for the same lot. The same holds for a key that several processes share. Without either, noise comes from
one stream that nothing can repeat, and lots from a key that a process has for itself.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from collections.abc import Callable
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from adadp.errors import ConfigurationError
from adadp.gradients.rounding import accumulation_dtype
from adadp.normal import normal_from, uniform_from

_TAIL = 4.0


class Randomness:
    """Gaussian noise, and named streams of uniform numbers.

    By default PyTorch's generator is used, started from 256 bits of the system's entropy (63 on a GPU, whose generator
    takes no more). It is fast, and unpredictable to anyone who does not see raw output of it, but it is not a
    cryptographic generator.

    Args:
        seed: for tests and papers. Whoever knows it can subtract the noise.
        secure: take all noise from the system's cryptographic source, and streams from SHAKE-256 with a key from there
            (slower). Has no effect with a seed.
        name: of the run. Different names have independent streams.
        key: 256 secret bits that several processes share to draw the same lots and noise (`sharing`).
        attempt: which of the noises and coins that the seed gives for a lot are drawn. 0 is the first attempt; others
            have random names (`new_attempt`), so that no two attempts ever meet.

    """

    def __init__(
        self,
        seed: int | None = None,
        *,
        secure: bool = False,
        name: str = "",
        key: bytes | None = None,
        attempt: int = 0,
    ) -> None:
        self.seeded = seed is not None
        self.secure = secure and seed is None
        self._seed, self._name, self._shared, self.attempt = seed, name, key, attempt
        self._key: bytes | None = None
        self._process = os.getpid() if self.seeded else None  # whose stream it is; an unseeded one's from its first use
        self._copied = False
        self._generators: dict[torch.device, torch.Generator] = {}
        self._made: list[tuple[torch.Generator, str]] = []  # all there ever were, with the names of their streams
        self._at = ""  # the lot and attempt whose noise is drawn; "" for a stream that no lot restarts
        self._drawn = 0  # how often noise was drawn for it, where `secure` processes share a key

    def spawn(self, name: str, attempt: int = 0) -> Randomness:
        """Return the randomness of one run, independent of this object's and of that of other names."""
        self._require_own()
        return type(self)(self._seed, secure=self.secure, name=f"{self._name}/{name}", attempt=attempt)

    def key_for(self, purpose: str) -> bytes:
        """A key of 32 bytes for something else than noise, such as comparing sums without keeping them."""
        return hashlib.sha256(b"key " + self._require_own() + f"{self._name} {purpose}".encode()).digest()

    def sharing(self, key: bytes) -> Randomness:
        """Return the randomness of one run that several processes work on, each with this object's settings and `key`.

        With a seed the key is not used: the processes have the seed in common.
        """
        return type(self)(self._seed, secure=self.secure, name=self._name, key=key, attempt=self.attempt)

    @property
    def assumption(self) -> str:
        """What the guarantee assumes about these draws."""
        if self.seeded:
            return "noise and lots come from a given seed, which stays secret and is used for this run only"
        if self.secure:
            return "noise and lots come from the operating system's cryptographic randomness"
        return (
            "noise and lots come from PyTorch's generator, started from system entropy; it is not a "
            "cryptographic generator (secure_mode=True uses one)"
        )

    # ---- one process, one stream ------------------------------------------------------------------------------------

    def _require_own(self) -> bytes:
        """Return the key of this process's draws, which is made at the first use.

        Raises:
            ConfigurationError: a seeded object was copied, or is used in another process than it was made in.

        """
        here = os.getpid()
        if self._copied or self._process not in (None, here):
            if self.seeded:
                raise ConfigurationError(
                    "this engine was made with a seed and then copied, pickled or carried into another process by a "
                    "fork: two of them would add the same noise, which comes off by subtraction. Make an engine with "
                    "another seed, or without one, in each process."
                )
            self._key, self._generators, self._made, self._copied = None, {}, [], False
            self._shared = None
        if self._key is None:
            self._process = here
            fresh = secrets.token_bytes(32) if self._shared is None else self._shared
            self._key = fresh if self._seed is None else hashlib.sha256(b"%d" % self._seed).digest()
        return self._key

    def __reduce__(self) -> Any:
        """Copies, deep copies and pickles are all made by `_copied`."""
        return _copied, (type(self), self._seed, self.secure, self._name, self.attempt)

    # ---- draws ------------------------------------------------------------------------------------------------------

    def begin_lot(self, number: int, attempt: int | None = None) -> None:
        """With a seed or a shared key, restart the noise from the lot's number and the attempt at it; else do nothing.

        The same pair gives the same noise again, so a pair must not serve two different sums
        (`adadp.mechanism.attempts` sees to that). `attempt` None is this run's. Generators are restarted in place: CUDA
        graphs that were recorded with them go on to use them.
        """
        if not self.seeded and self._shared is None:
            return
        key = self._require_own()
        attempt = self.attempt if attempt is None else attempt
        self._at, self._drawn = f" lot {number} attempt {attempt}", 0
        for generator, name in self._made:
            _start(generator, key, name + self._at)

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator that draws noise on `device`; not used with `secure`."""
        key = self._require_own()
        if device not in self._generators:
            self._make(device, key, "")
        return self._generators[device]

    def renew(self, device: torch.device) -> None:
        """Start a new stream after a failed recording of a CUDA graph, which leaves its generator unusable.

        It does not continue where the old one stands: another recording may still use the old one, and the same noise
        would be added to two lots.
        """
        key = self._require_own()
        self._make(device, key, f" renewed {len(self._made)}")

    def _make(self, device: torch.device, key: bytes, suffix: str) -> None:
        # The device's number among those of its kind here: its index is another in each process that has its own GPU.
        kind = [each for each in self._generators if each.type == device.type]
        place = kind.index(device) if device in kind else len(kind)
        name = f"{self._name} noise {device.type} {place}{suffix}"
        generator = self._generators[device] = _start(torch.Generator(device), key, name + self._at)
        self._made.append((generator, name))

    def normal(self, like: Tensor) -> Tensor:
        """Draw independent standard normal values of `like`'s shape and device, in at least float32.

        PyTorch makes float32 values from 24 random bits on a CPU and from 32 on a GPU: no value is beyond 5.77 or 6.76,
        so a sum further out would show that an example was in it, more often than a small delta allows. Here the tails
        are those of a normal distribution up to 8 and more.
        """
        if self.secure:
            drawn = torch.from_numpy(normal_from(self._secure_bytes(), like.numel()))
            return drawn.to(like.device).view(like.shape)
        generator = self.generator(like.device)
        drawn = torch.empty(like.shape, dtype=accumulation_dtype(like.dtype), device=like.device)
        drawn.normal_(generator=generator)
        if drawn.dtype == torch.float64:
            return drawn
        if like.device.type == "cpu":
            return with_tails(drawn, generator)
        # (a + b) / sqrt(2) is normal too, and far out only where neither a nor b is. Nothing waits for the GPU.
        return drawn.add_(torch.empty_like(drawn).normal_(generator=generator)).mul_(math.sqrt(0.5))

    def _secure_bytes(self) -> Callable[[int], bytes]:
        """The system's random bytes; where processes share a key, those that SHAKE-256 makes of it."""
        key = self._require_own()
        if self._shared is None:
            return secrets.token_bytes

        def draw(count: int) -> bytes:
            self._drawn += 1
            place = f"{self._name} noise{self._at} draw {self._drawn}"
            return hashlib.shake_256(key + place.encode()).digest(count)

        return draw

    def lot_stream(self, number: int, what: str = "") -> Stream:
        """Return the stream from which lot `number`, or `what` else of it, is drawn, in this run's attempt.

        A lot that is released a second time is drawn anew: two releases on one draw cost more than one release on each
        of two.
        """
        return self.stream(f"{what}lot {number} attempt {self.attempt}" if self.attempt else f"{what}lot {number}")

    def stream(self, name: str) -> Stream:
        """Return the stream that is determined by this run's key and `name`; each call starts it from the beginning."""
        key, name = self._require_own(), f"{self._name} stream {name}"
        if not self.secure:
            return Stream(_from_generator(_start(torch.Generator(), key, name)))
        position = 0

        def draw(count: int) -> Tensor:
            nonlocal position
            position += 1
            source = hashlib.shake_256(b"%s %s %d" % (key, name.encode(), position))
            return torch.from_numpy(uniform_from(source.digest, count))

        return Stream(draw)


@overload
def derived(seed: int, purpose: str) -> int: ...
@overload
def derived(seed: int | None, purpose: str) -> int | None: ...
def derived(seed: int | None, purpose: str) -> int | None:
    """A seed for one purpose, where there is one for all: the streams of different purposes share nothing."""
    if seed is None:
        return None
    return int.from_bytes(hashlib.sha256(f"{purpose} {seed}".encode()).digest()[:8], "big") >> 1


def with_tails(drawn: Tensor, generator: torch.Generator) -> Tensor:
    """Draw normal values beyond +-4 again, in place, from the exact tail and with 53 bits.

    Of 24 random bits enough are left at 4 to get its probability right within 0.02%, but not further out.
    """
    flat = drawn.view(-1)
    far = torch.from_numpy(np.flatnonzero(np.abs(flat.numpy()) > _TAIL))  # three times as fast as torch's `nonzero`
    if len(far):
        uniform = 1 - torch.empty(len(far), dtype=torch.float64).uniform_(generator=generator)  # in (0, 1]
        lower = torch.special.ndtri(uniform * torch.special.ndtr(torch.tensor(-_TAIL, dtype=torch.float64)))
        flat[far] = flat[far].sign() * -lower.to(drawn.dtype)
    return drawn


class Stream:
    """A sequence of uniform draws."""

    def __init__(self, draw: Callable[[int], Tensor]) -> None:
        self._draw = draw

    def uniform(self, count: int) -> Tensor:
        """Draw independent uniform values in [0, 1), float64, on the CPU."""
        return self._draw(count)

    def permutation(self, count: int) -> Tensor:
        """Draw a uniformly random permutation of 0..count-1."""
        return self.uniform(count).argsort()


def new_attempt() -> int:
    """The name of an attempt that nobody made before."""
    return secrets.randbits(62) + 1


def _copied(kind: type[Randomness], seed: int | None, secure: bool, name: str, attempt: int) -> Randomness:
    copied = kind(seed, secure=secure, name=name, attempt=attempt)
    copied._copied = True
    return copied


def _from_generator(generator: torch.Generator) -> Callable[[int], Tensor]:
    return lambda count: torch.empty(count, dtype=torch.float64).uniform_(generator=generator)


_CPU_STATE_BYTES = 5056  # PyTorch's Mersenne Twister: three words, 624 words of state, what is left of normal draws
_CPU_WORDS = slice(3, 3 + 624)


def _start(generator: torch.Generator, key: bytes, name: str) -> torch.Generator:
    """Set the generator's whole state to one that is determined by `key` and `name`, and return it.

    On a CPU `manual_seed` uses the last 32 bits of its argument only. An attacker could try all of them and subtract
    the noise, so the Mersenne Twister's whole state is set here.
    """
    stream = hashlib.shake_256(key + name.encode()).digest(8 + 4 * 624)
    generator.manual_seed(int.from_bytes(stream[:8], "little") >> 1)
    if generator.device.type == "cpu":
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
