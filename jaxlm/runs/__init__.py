"""Run folders: creating and locking one, what may change when a run is resumed, and reading a run."""
