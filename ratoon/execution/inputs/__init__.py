"""Inputs of a step: the persistent rows of requests, and what a step gathers from them on host and device."""
