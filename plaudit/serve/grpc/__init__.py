"""KServe's v2 protocol over gRPC (extra `grpc`)."""
