"""The train loop and what it needs: state, step, optimizers, checkpoints, metrics; objectives only by their protocol."""
