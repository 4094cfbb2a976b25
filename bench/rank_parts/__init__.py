"""Programs that bench/ranks.py runs in other processes."""
