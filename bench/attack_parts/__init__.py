"""The parts of attacks.py: each module measures one kind of attack."""
