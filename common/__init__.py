"""What every part uses: one-line errors, atomic file writes, PyTorch's private parts. Imports no other part of ours."""
