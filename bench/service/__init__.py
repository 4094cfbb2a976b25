"""What the programs that measure the service share: a server process, clients for many streams, a sampling profiler."""
