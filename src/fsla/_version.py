"""The version of fsla. It is written here alone; the build reads it from here."""

__version__ = "0.1.0"
