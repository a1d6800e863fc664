"""What each op means, in plain PyTorch: recurrences token by token, attention row by row."""
