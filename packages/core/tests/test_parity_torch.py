chunkwise_backend = "torch"
