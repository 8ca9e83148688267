"""Features of images that nothing is learnt for, so that they cost nothing."""

from adadp.features.images import features_of, made_images, most_directions, public_directions
from adadp.features.scattering import Scattering

__all__ = ["Scattering", "features_of", "made_images", "most_directions", "public_directions"]
