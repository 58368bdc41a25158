"""`fsla bench data`: which data to trust, against what a careful user would do without the library."""
