"""Features of images that nothing is learnt for, so that they cost nothing."""

from adadp.features.scattering import Scattering

__all__ = ["Scattering"]
