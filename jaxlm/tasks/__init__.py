"""Fine-tuning and evaluation on tasks."""
