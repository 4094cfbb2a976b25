"""Parts of structured.py: schemas, and the peer."""
