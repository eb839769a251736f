"""One file per pretraining objective: what is asked of the model, and how an answer is scored."""
