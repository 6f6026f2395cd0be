"""Models in the folders of Hugging Face transformers: read and written."""
