"""Configuration of runs: dataclasses, presets, JSON and flags."""
