"""The algorithms compared at equal numbers of oracle calls."""
