"""What attacks.py measures, a module for each part."""
