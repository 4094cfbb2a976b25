"""What the programs that measure the service share: a server process, and the least that event streams cost."""
