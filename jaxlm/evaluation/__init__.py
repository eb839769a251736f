"""Evaluation of whole models: prompts, text vectors, and adapters for other evaluation packages."""
