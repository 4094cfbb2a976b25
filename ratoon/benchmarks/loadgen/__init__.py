"""The load generator of `ratoon bench serve`: requests, arrival times, records and figures."""
