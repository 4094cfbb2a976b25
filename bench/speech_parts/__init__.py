"""What speech.py measures, a module for each part, and the picture of the results."""
