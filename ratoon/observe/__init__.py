"""Logging, start-up timing, metrics. Imports only core; anybody may import it."""
