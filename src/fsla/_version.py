"""The version of fsla."""

__version__ = "0.1.0"
