"""The recurrences of every op, token by token, in plain PyTorch: what each op means."""
