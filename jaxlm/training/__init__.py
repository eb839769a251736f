"""The train loop and what it needs: state, step, optimizers, checkpoints, metrics. Knows objectives by their protocol."""
