"""Rules over logits, one file each: how a request changes the logits before a token is chosen (rules/base.py)."""
