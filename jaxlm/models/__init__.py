"""Model families: Flax Linen modules behind pure functions. No other package imports flax."""
