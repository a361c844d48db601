"""Hugging Face checkpoint directories, read and written without torch."""
