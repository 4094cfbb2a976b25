"""The two-stage experiment as a client of a server: stage 2 of each conversation is sent as its stage 1 ends."""
