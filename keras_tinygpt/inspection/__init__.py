"""Looking inside a model: attention maps, heads, causes, leaks, probes, surprise.

Attention weights say where a head read, not why the model predicted what it did;
`causes` measures the second. Works on any functional model made of our blocks.
"""

from keras_tinygpt.inspection.causes import Causes, causes, rank_correlation
from keras_tinygpt.inspection.heads import HeadMetrics, head_metrics
from keras_tinygpt.inspection.leaks import Leak, leak_test
from keras_tinygpt.inspection.maps import AttentionMaps, attention_maps
from keras_tinygpt.inspection.predictions import (
    Candidate,
    character_surprise,
    next_tokens,
    print_surprise,
    surprise,
)
from keras_tinygpt.inspection.probes import (
    PositionProbe,
    position_probe,
    token_similarity,
    without_positions,
)
from keras_tinygpt.inspection.trace import Trace, Tracer

__all__ = [
    "AttentionMaps",
    "Candidate",
    "Causes",
    "HeadMetrics",
    "Leak",
    "PositionProbe",
    "Trace",
    "Tracer",
    "attention_maps",
    "causes",
    "character_surprise",
    "head_metrics",
    "leak_test",
    "next_tokens",
    "position_probe",
    "print_surprise",
    "rank_correlation",
    "surprise",
    "token_similarity",
    "without_positions",
]
