"""Rules over logits, one file each: what a request does to the logits before a token is chosen (rules/base.py)."""
