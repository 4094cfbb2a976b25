"""The load generator of `ratoon bench serve`: what is sent, when, what comes back and how fast."""
