"""Automatic steps against the best of a grid."""
