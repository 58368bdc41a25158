"""Data quality: which data to trust, on data made bad on purpose, against the alternatives."""
