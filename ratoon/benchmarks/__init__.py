"""What `ratoon bench` runs: speed of an engine, load on a server, the two-stage experiment. A client of api."""
