"""Text to ids and back: training, published formats, export."""
