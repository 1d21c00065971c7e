"""The trained model: its layers, its frozen ends and its loss."""
