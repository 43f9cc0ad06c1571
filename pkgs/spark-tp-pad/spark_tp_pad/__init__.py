"""Padding of tensor-parallel sizes for SGLang, loaded as a plugin of the engine."""
