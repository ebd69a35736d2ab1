"""Code that every part uses: one-line errors, atomic file writes, PyTorch's private parts. It imports no other part."""
