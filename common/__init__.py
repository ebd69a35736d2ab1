"""What every part uses: errors of one line, files written whole, PyTorch's private parts. Imports nothing of ours."""
