chunkwise_backend = "tilelang"
