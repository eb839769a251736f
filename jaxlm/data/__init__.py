"""From raw text to batches of tokens, on the host; knows neither jax nor models."""
