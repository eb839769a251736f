"""The train loop and its parts: state, step, optimizers, checkpoints, metrics. Knows objectives by their protocol."""
