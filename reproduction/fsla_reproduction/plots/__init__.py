"""Records -> pictures. Nothing here computes a result."""
