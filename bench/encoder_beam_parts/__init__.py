"""What encoder_beams.py measures, the models that it makes for that, and the picture of the results."""
