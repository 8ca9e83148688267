"""Scattering against a slow, direct reference, and what it promises."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from adadp.errors import ConfigurationError
from adadp.features.scattering import ORIENTATIONS, Scattering, _wavelet_scale

SMALL = Scattering(1, 16, 20, 2)


def some_images(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


# ---- the reference: filters in space, sums written out, every place computed and then left out ----------------------


def morlet(j: int, angle: float, size: tuple[int, int]) -> np.ndarray:
    """A Morlet wavelet of scale 2^j in space, wrapped around, scaled as a Gaussian of sum 1."""
    deviation, slant, wave = 0.8 * 2**j, 4 / ORIENTATIONS, 0.75 * math.pi / 2**j
    window, waves = np.zeros(size), np.zeros(size, dtype=complex)
    for up in range(-3, 4):
        for left in range(-3, 4):
            y = np.arange(size[0])[:, None] + up * size[0]
            x = np.arange(size[1])[None] + left * size[1]
            along, across = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
            gauss = np.exp(-(along**2 + (slant * across) ** 2) / (2 * deviation**2)) * slant
            window += gauss / (2 * math.pi * deviation**2)
            waves += gauss * np.exp(1j * wave * along) / (2 * math.pi * deviation**2)
    return waves - window * (waves.sum() / window.sum())


def gaussian(deviation: float, size: tuple[int, int]) -> np.ndarray:
    sides = []
    for side in size:
        places = np.arange(side)[:, None] + side * np.arange(-4, 5)[None]
        one = np.exp(-(places**2) / (2 * deviation**2)).sum(1)
        sides.append(one / one.sum())
    return np.outer(*sides)


def convolved(signal: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Circular convolution as a sum of shifted copies."""
    total = np.zeros(signal.shape, dtype=complex)
    for y in range(kernel.shape[0]):
        for x in range(kernel.shape[1]):
            total += kernel[y, x] * np.roll(signal, (y, x), (0, 1))
    return total


def slow(image: np.ndarray, scales: int) -> np.ndarray:
    """Scattering of one channel (height, width): (maps, rows, columns)."""
    edge = 2**scales
    padded = [-(-(side + 2 * edge) // edge) * edge for side in image.shape]
    after = [total - side - edge for total, side in zip(padded, image.shape, strict=True)]
    signal = np.pad(image, [(edge, after[0]), (edge, after[1])], mode="reflect")
    scale = _wavelet_scale(scales, (padded[0], padded[1]))
    maps = [-(-side // edge) for side in image.shape]
    angles = [math.pi * number / ORIENTATIONS for number in range(ORIENTATIONS)]

    def averaged(found: np.ndarray, r: int) -> np.ndarray:
        every = 2 ** (scales - r)
        low = convolved(found, gaussian(0.8 * 2.0 ** (scales - 1 - r), found.shape)).real
        return low[every::every, every::every][: maps[0], : maps[1]]

    def modulus(found: np.ndarray, j: int, r: int, angle: float) -> np.ndarray:
        every = 2 ** (j - r)
        return np.abs(scale * convolved(found, morlet(j - r, angle, found.shape)))[::every, ::every]

    zero, one, two = [averaged(signal, 0)], [], []
    for j in range(scales):
        for angle in angles:
            first = modulus(signal, j, 0, angle)
            one.append(averaged(first, j))
        for k in range(j + 1, scales):
            for angle in angles:
                first = modulus(signal, j, 0, angle)
                two.extend(averaged(modulus(first, k, j, other), k) for other in angles)
    return np.stack(zero + one + two)


@pytest.mark.parametrize("scattering", [SMALL, Scattering(2, 9, 8, 1)])
def test_it_is_what_the_sums_written_out_give(scattering: Scattering) -> None:
    image = some_images(1, scattering.channels, scattering.height, scattering.width)
    found = scattering(image)[0].reshape(scattering.channels, scattering.maps, *scattering.map_size)
    for channel in range(scattering.channels):
        wanted = slow(image[0, channel].double().numpy(), scattering.scales)
        np.testing.assert_allclose(found[channel].numpy(), wanted, atol=2e-6)


# ---- what it promises -----------------------------------------------------------------------------------------------


def test_images_of_28_pixels_become_3969_features_a_channel() -> None:
    plan = Scattering.for_images((3, 28, 28))
    assert (plan.scales, plan.maps, plan.map_size, plan.size) == (2, 81, (7, 7), 3 * 3969)
    assert plan(torch.zeros(2, 3, 28, 28)).shape == (2, 3 * 3969)


@pytest.mark.parametrize(
    ("shape", "scales", "resized"),
    [((1, 8, 8), 1, (8, 8)), ((3, 32, 32), 2, (32, 32)), ((3, 48, 40), 3, (48, 40)), ((1, 300, 200), 3, (64, 43)),
     ((1, 3, 3), 1, (8, 8)), ((1, 1, 1), 1, (8, 8)), ((3, 17, 31), 2, (17, 31)), ((1, 2000, 10), 1, (512, 8))],
)  # fmt: skip
def test_images_of_any_size_are_taken(shape: tuple[int, ...], scales: int, resized: tuple[int, int]) -> None:
    plan = Scattering.for_images(shape)
    assert (plan.scales, plan.resized) == (scales, resized)
    found = plan(some_images(2, *shape))
    assert found.shape == (2, plan.size)
    assert found.isfinite().all()


def test_a_shift_by_a_pixel_moves_features_far_less_than_pixels() -> None:
    image = torch.zeros(1, 1, 28, 28)
    image[:, :, 8:20, 11:14] = 1.0
    moved = image.roll(1, 3)
    plan = Scattering.for_images((1, 28, 28))
    pixels = (moved - image).norm() / image.norm()
    features = (plan(moved) - plan(image)).norm() / plan(image).norm()
    assert features < pixels / 3


def test_no_energy_is_added_and_distances_do_not_grow() -> None:
    """Each feature stands for 4^J pixels."""
    one, other = some_images(40, 1, 28, 28).split(20)
    plan = Scattering.for_images((1, 28, 28))
    for difference, pixels in ((plan(one), one), (plan(one) - plan(other), one - other)):
        padded = torch.nn.functional.pad(pixels, (4, 4, 4, 4), mode="reflect")
        assert (16 * difference.square().sum(1) <= 1.02 * padded.square().flatten(1).sum(1)).all()


def test_only_the_average_sees_a_constant_image() -> None:
    found = SMALL(torch.full((1, 1, 16, 20), 0.7)).reshape(SMALL.maps, -1)
    assert torch.allclose(found[0], torch.tensor(0.7), atol=1e-6)
    assert found[1:].abs().max() < 1e-6


def test_an_image_is_mapped_by_itself_without_gradients_as_float32() -> None:
    images = some_images(300, 1, 16, 20).requires_grad_()
    found = SMALL(images)
    assert not found.requires_grad
    for dtype in (torch.float64, torch.float16):
        assert SMALL(images.detach().to(dtype)).dtype == torch.float32
    alone = torch.cat([SMALL(image[None]) for image in images[::37].detach()])
    assert torch.allclose(alone, found[::37], atol=1e-6)
    assert SMALL(images[:0]).shape == (0, SMALL.size)


def test_what_it_cannot_take_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="scales"):
        Scattering(1, 8, 8, 3)
    with pytest.raises(ConfigurationError, match="shape"):
        SMALL(torch.zeros(1, 1, 20, 16))
