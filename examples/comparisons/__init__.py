"""What each example is compared with, and its picture: run by `python examples/gallery.py`."""
