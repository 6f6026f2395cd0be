"""Models for other programs: SavedModels that need TensorFlow alone."""
