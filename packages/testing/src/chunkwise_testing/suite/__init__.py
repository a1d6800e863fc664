"""The generated suite: one class for each family of promises, generic over ops, implementations and devices."""
