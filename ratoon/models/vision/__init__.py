"""Encoders of images and video, one file for each family, over shared layers (vit.py)."""
