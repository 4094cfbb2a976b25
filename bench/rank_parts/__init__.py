"""What bench/ranks.py runs in other processes."""
