"""Experiments: their dataclasses, presets, JSON and flags."""
