"""Hugging Face checkpoint directories: names, tensors, reading and writing; no torch."""
