"""Datasets: loader.py reads them, writer.py writes them, and each folder has its prepare.py."""
