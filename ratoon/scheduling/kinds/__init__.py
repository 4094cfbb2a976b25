"""The kinds of requests, one file for each: generation, search, pooling, extraction."""
