"""What a trained model can be asked: fill masks, continue text."""
