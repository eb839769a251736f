"""Flax Linen modules behind pure functions: the only floor that imports flax."""
