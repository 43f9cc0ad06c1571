"""Measure an OpenAI-compatible endpoint so that someone else can check the result."""
