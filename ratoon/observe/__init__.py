"""Logging, start-up timing, metrics. Imports only core; every room may import it."""
