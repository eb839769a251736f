"""Run folders: training in them, resuming, loading."""
