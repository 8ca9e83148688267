"""One file for each kind of layer. Importing this package registers all of them."""

from adadp.gradients.layers import attention, convolution, embedding, linear, normalization, recurrent

__all__ = ["attention", "convolution", "embedding", "linear", "normalization", "recurrent"]
