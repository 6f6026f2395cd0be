"""Models for places without Keras."""
