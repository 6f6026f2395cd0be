"""Continuing token sequences: filters and draws, the plain loop, the cached engine."""

from keras_tinygpt.generation.beam import beam_search
from keras_tinygpt.generation.decoding import generate, stream
from keras_tinygpt.generation.filling import fill_masks
from keras_tinygpt.generation.sampling import SamplingConfig, draw_uniforms, sample

__all__ = [
    "SamplingConfig",
    "beam_search",
    "draw_uniforms",
    "fill_masks",
    "generate",
    "sample",
    "stream",
]
