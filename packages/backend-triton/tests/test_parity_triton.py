chunkwise_backend = "triton"
