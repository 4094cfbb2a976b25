"""The version of the package: its only definition."""

__version__ = "0.1.0"
