"""How fsla writes and reads files: whole or not at all, under locks and digests, and checked before use."""
